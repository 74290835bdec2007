"""Read the state and results of a run, and export, report or end it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from rich.console import Console

from launch.api.errors import NotEnded, RunFailed
from launch.executors.executor import RunJob
from launch.executors.record import read_record
from launch.executors.slurm_client import SlurmError
from launch.export import ExportRequest, export
from launch.pages import report_page
from launch.runs import run_keys, run_state, run_summary, status_text
from launch.runs.follow import Follower, MetricsTail, failure
from launch.runs.run_folder import RunFolder
from launch.runs.run_state import StateName
from launch.submission import run_control
from pipeline.checkpoints.checkpoint import Checkpoint, complete_in
from pipeline.config import Problem, Recipe, RecipeError
from pipeline.config import read as read_recipe
from pipeline.observe.metrics import Reader, read_rollouts

ENDED = ("done", "failed", "stopped")


@dataclass(frozen=True)
class RunStatus:
    """The state of a run at one moment. `str()` is what `python launch/status.py RUN_DIR` prints."""

    state: StateName  # waiting, running, done, failed, stopped (cancelled, or saved on request) or unknown
    why: str  # why it waits, has ended, or is unknown; "" if there is nothing to say
    job: str  # the job for people, such as `Slurm job 17`; "" before there is one
    step: int  # the last step that has ended; 0 before the first
    max_steps: int | None  # None if only the epochs of data bound it
    seconds_per_step: float | None
    seconds_left: float | None  # of the steps; None unless the run goes on and its pace is known
    restarts: int
    checkpoint: int | None  # step of the latest complete checkpoint
    metrics: Mapping[str, float]  # latest value of each main metric
    failure: Sequence[str]  # why the latest attempt failed, in lines; empty if it did not
    values: Mapping[str, Any] = field(repr=False)  # everything, as `status.py RUN_DIR json=true` prints it

    @property
    def ended(self) -> bool:
        """True if the run has ended: done, failed or stopped."""
        return self.state in ENDED

    def __str__(self) -> str:
        return status_text.text(dict(self.values))


class BaseRun:
    """The base class of all submitted runs.

    Every method reads the folder and the job anew, so nothing becomes stale. All methods raise RecipeError for a folder or a
    job that cannot be read.
    """

    def __init__(self, folder: Path, notes: Sequence[str] = (), job: RunJob | None = None):
        """Open the run in a folder.

        notes: the notes of its submission. job: its job, if this process has just submitted it.
        """
        self.folder = folder.absolute()
        self.notes = tuple(notes)
        self._job = job  # also keeps the process of a local job from being reaped by another

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe in the run's folder."""
        return read_recipe(self.folder / "recipe.yaml")

    # ---- how it goes ----------------------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """Return the state of the run. Queries its job, within seconds."""
        run = RunFolder.at(self.folder)
        summary = run_summary.full(run, run_state.state(run))
        latest = {key: values[-1] for key, values in summary["metrics"].items()}
        names = ("state", "why", "job", "step", "max_steps", "seconds_per_step", "seconds_left", "restarts")
        checkpoint = summary["checkpoint"].get("step")
        return RunStatus(
            **{name: summary[name] for name in names},
            checkpoint=checkpoint,
            metrics=latest,
            failure=summary["failure"],
            values=summary,
        )

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> RunStatus:
        """Wait for the end of the run's job, and return the status: done, or stopped by somebody.

        An interrupt (KeyboardInterrupt) ends the wait; the run goes on.

        Args:
            timeout: seconds; None: without a limit.
            progress: Print a line per step, and what the run waits for.

        Raises:
            NotEnded: after `timeout`.
            RunFailed: if the run ended by itself before it was complete.
        """
        if self.status().state == "done" and not self._is_here():
            return self.status()
        job, metrics = self._attach(), MetricsTail(self.folder)
        metrics.new_lines()
        console = None if progress else Console(quiet=True)
        follower = Follower(self.folder, job, run_control.max_steps(self.recipe), metrics, console)
        try:
            succeeded = follower.follow(timeout)
        except TimeoutError as late:
            raise NotEnded(self.folder, str(late)) from None
        status = self.status()
        if not succeeded and status.state != "stopped":
            raise RunFailed(self.folder, failure(self.folder, job, job.status()))
        return status

    # ---- what it wrote --------------------------------------------------------------------------------------------------

    @overload
    def metrics(self) -> list[dict[str, Any]]: ...

    @overload
    def metrics(self, key: str) -> dict[int, float]: ...

    def metrics(self, key: str | None = None) -> list[dict[str, Any]] | dict[int, float]:
        """Return the records of all steps; with `key`, step -> the value of this metric.

        A record has `step`, `time` (unix seconds) and the step's metrics, such as `train/reward`; `pandas.DataFrame` takes the
        list. A run that was restarted has each step once.

        Args:
            key: a metric. Steps without it are left out, and a value that was not finite is NaN.
        """
        by_step: dict[int, dict[str, Any]] = {}
        for line in Reader(RunFolder.at(self.folder).folder / "metrics.jsonl").lines():
            by_step[line["step"]] = by_step.get(line["step"], {}) | line
        records = [by_step[step] for step in sorted(by_step)]
        if key is None:
            return records
        return {record["step"]: math.nan if record[key] is None else record[key] for record in records if key in record}

    def rollouts(self, step: int | None = None, *, validation: bool = False) -> list[dict[str, Any]]:
        """Return the rollouts of a step as records: prompt, completion, reward and more.

        `logger.num_rollouts_to_log` limits how many a run writes. Raises RecipeError if they are encrypted and the key is not
        here (HETSTEP_KEY_FILE).

        Args:
            step: the step of the rollouts; None: the latest step that has some.
            validation: the rollouts of the validation after the step, in place of the rollouts that it trained on.
        """
        kind = "val" if validation else "step"
        paths = {int(path.stem.rpartition("_")[2]): path for path in (self.folder / "rollouts").glob(f"{kind}_*.jsonl")}
        if not paths or (step is not None and step not in paths):
            hint = f"expected one of {', '.join(map(str, sorted(paths)))}" if paths else "the run has no such rollouts yet"
            raise RecipeError(Problem("step", "file-not-found", f"got {step}; {hint}, in {self.folder / 'rollouts'}"))
        path = paths[max(paths) if step is None else step]
        return read_rollouts(path, run_keys.source(self.folder))  # without the last line, if it is incomplete

    def checkpoints(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first. Each has `step`, `folder` and `metric`."""
        return complete_in(RunFolder.at(self.folder).folder / "checkpoints")

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Return the complete checkpoint of a step; None: the latest. Raises RecipeError if there is none."""
        checkpoints = {checkpoint.step: checkpoint for checkpoint in self.checkpoints()}
        if not checkpoints or (step is not None and step not in checkpoints):
            hint = (
                f"expected one of {', '.join(map(str, checkpoints))}" if checkpoints else "the run has no complete checkpoint"
            )
            raise RecipeError(Problem("step", "no-checkpoint", f"got {step}; {hint}"))
        return checkpoints[max(checkpoints) if step is None else step]

    # ---- what can be made of it -----------------------------------------------------------------------------------------

    def export(self, step: int | None = None, out: str | Path | None = None, *, adapter: bool = False) -> Path:
        """Write a checkpoint in Hugging Face format with a model card, and return its folder. Imports torch.

        Args:
            step: the step of the checkpoint; None: the latest.
            out: a new folder; None: `hf_step_N` or `adapter_step_N` in the run's folder.
            adapter: Write the adapters alone, in peft's format.
        """
        return export(ExportRequest(self.folder, step, None if out is None else Path(out).absolute(), adapter))

    def report(self, out: str | Path | None = None) -> Path:
        """Write a page of curves, phases and samples, with plotly.min.js beside it, and return its path.

        Args:
            out: the page; None: `report.html` in the run's folder.
        """
        path = self.folder / "report.html" if out is None else Path(out).absolute()
        report_page.write(report_page.read([self.folder]), path)
        return path

    # ---- its end --------------------------------------------------------------------------------------------------------

    def cancel(self) -> RunStatus:
        """Cancel the run's job, wait for its end, and return the status. Steps after the last checkpoint are lost.

        Does nothing to a run that has ended. Raises NotEnded if the job goes on after a minute.
        """
        job = self._attach()
        status = self._ask_slurm(run_control.cancel, self.folder, job)
        if not status.ended:
            raise NotEnded(self.folder, f"{job.name()} is still {status}")
        return self.status()

    def stop_and_save(self, timeout: float | None = None) -> RunStatus:
        """Ask the run to save at the end of its step and to stop, wait for that, and return the status.

        `hetstep.submit` with the same recipe continues the run from there. A job that still waits in the queue is cancelled. A
        run that has ended stays as it is.

        Args:
            timeout: seconds; None: without a limit.

        Raises:
            NotEnded: after `timeout`; the request stays, and the run stops later.
            RunFailed: if the run failed before it had saved.
        """
        job = self._attach()
        if self._ask_slurm(job.status, True).ended:
            return self.status()
        try:
            job_status = self._ask_slurm(run_control.stop_and_save, self.folder, job, timeout)
        except TimeoutError as late:
            raise NotEnded(self.folder, str(late)) from None
        status = self.status()
        if status.state == "failed":
            raise RunFailed(self.folder, failure(self.folder, job, job_status))
        return status

    # ---- the job --------------------------------------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """The Slurm id of the job (with several components, of the first); of a local job, its controller's process id."""
        return self._attach().job_id

    def _attach(self) -> RunJob:
        record = read_record(RunFolder.at(self.folder).folder)
        if record is None:
            raise RecipeError(Problem("run", "not-a-run", f"{self.folder} has no job: there is no job.json"))
        if self._job is not None and self._job.job_id == record.job_id:
            return self._job
        return record.attach(self.folder)

    def _is_here(self) -> bool:
        """Return whether the run's job can be queried from here."""
        try:
            self._attach().status(now=True)
        except (RecipeError, SlurmError):
            return False
        return True

    def _ask_slurm(self, request: Any, *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except SlurmError as error:
            raise RecipeError(Problem("run", "unreachable", f"Slurm did not answer: {error}. Try again")) from error
