"""Evaluate the checkpoints of a live run as they are completed, oldest first, each in its own job.

The follower ends when the run has ended and all due checkpoints are evaluated. It keeps due checkpoints that the run would
remove (`launch/runs/waiting_checkpoints.py`). If the follower is killed, the same command continues: it follows a job that
still evaluates, and does not repeat complete evaluations.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from launch.evaluations import evaluation_job
from launch.evaluations.evaluation_job import Evaluation
from launch.executors.executor import RunJob
from launch.executors.record import read_record
from launch.runs import (
    evaluation_sources,
    folder_lock,
    follow,
    follower_process,
    run_setup,
    score_tables,
    suites,
    waiting_checkpoints,
)
from launch.runs.follower_process import FollowRequest
from launch.runs.run_folder import RunFolder
from launch.runs.run_state import state
from launch.terminal.safe_text import plain
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import Checkpoint
from pipeline.config import Problem, Recipe, RecipeError

POLL_S = 2.0
STATE_S = 10.0
"""Seconds between two queries of the run's job.

The run counts as ended once two queries in a row find it so, because a resubmission looks like an end for a moment.
"""
RETRY_S = 30.0
"""Seconds before another attempt after a submission that failed."""
TRIES = 2
"""Number of attempts at one evaluation before it is given up."""
LOCK_WAIT_S = 20.0
"""Seconds to wait for the lock of a follower that is about to end."""
ENDED = ("done", "failed", "stopped")


class CheckpointFollower:
    """Follows one run, and evaluates its checkpoints with one suite."""

    def __init__(self, request: FollowRequest, suite: str):
        """Prepare to follow a run. Raises RecipeError.

        suite: the suite of the request, or of the run's section `evaluation`.
        """
        self.request, self.suite = request, suite
        self.run_dir = request.run_dir
        self.name = suites.find(suite)[0]
        self.folder = self.run_dir / evaluation_sources.FOLDER / self.name
        self.seen: dict[Path, Checkpoint] = {}  # complete checkpoints of the run
        self.due: dict[int, Checkpoint] = {}  # kept, and not evaluated
        self.tries: dict[int, int] = {}
        self.failed: dict[int, str] = {}
        self.running: tuple[int, Evaluation, RunJob] | None = None  # with the step
        self.retry_at = 0.0
        self.asked_at, self.ended = 0.0, 0  # last query of the run's job; queries in a row that found its end

    def follow(self) -> int:
        """Evaluate until the run has ended and nothing is left. Return 1 if an evaluation was given up, else 0.

        Raises RecipeError if another process follows the run with this suite.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with folder_lock.hold_lock(self.folder, "run", LOCK_WAIT_S):
                follower_process.write_record(self.folder, self.request, self.failed)
                self._adopt()
                while self._step():
                    time.sleep(POLL_S)
        except RecipeError as error:
            if error.problems[0].code != "in-use":
                raise
            record = follower_process.read_record(self.folder)
            who = f"process {record.pid} on {record.host}" if record else "another process"
            message = f"{who} already evaluates new checkpoints of {self.run_dir} by {self.name}; see {self.folder.parent}"
            raise RecipeError(Problem("run", "in-use", message)) from None
        return 1 if self.failed else 0

    def _adopt(self) -> None:
        """Take over the checkpoints that an earlier follower has kept."""
        for folder in waiting_checkpoints.folders(self.folder):
            if run_setup.ended_well(folder.parent):
                _release_judged(folder.parent)
            elif saved := checkpoint.read(folder):
                self.due[saved.step] = saved

    def _step(self) -> bool:
        """Keep due checkpoints, check the running evaluation, and start the next one if none runs.

        Return whether anything is left or may come.
        """
        recipe = evaluation_sources.read_run(self.run_dir)
        has_ended = self._has_ended()
        self._keep(recipe, has_ended)
        if self.running:
            self._poll(*self.running)
        if not self.running and self.due and time.monotonic() >= self.retry_at:
            self._start(recipe, self.due[min(self.due)])
        return bool(self.running or self.due) or not has_ended

    def _has_ended(self) -> bool:
        """Return whether the last two queries both found that the run has ended."""
        if time.monotonic() - self.asked_at >= STATE_S:
            self.asked_at = time.monotonic()
            self.ended = self.ended + 1 if state(RunFolder.at(self.run_dir)).name in ENDED else 0
        return self.ended > 1

    # ---- checkpoints ----------------------------------------------------------------------------------------------------

    def _keep(self, recipe: Recipe, has_ended: bool) -> None:
        """Keep the checkpoints that are now due for an evaluation, so that the run does not remove them."""
        folders = sorted((self.run_dir / "checkpoints").glob("step_*"))
        self.seen = {
            path: saved
            for path in folders
            if checkpoint.NAME.fullmatch(path.name) and (saved := self.seen.get(path) or checkpoint.read(path))
        }
        by_step = {c.step: c for c in self.seen.values()}
        for step, saved in by_step.items():
            folder = evaluation_sources.evaluation_folder(self.run_dir, self.name, step)
            if step in self.due or step in self.failed or run_setup.ended_well(folder):
                continue
            if self.is_due(recipe, step) or (has_ended and step == max(by_step)):
                try:
                    waiting_checkpoints.keep(saved.folder, folder)
                except RecipeError as error:
                    if error.problems[0].code != "no-checkpoint":  # else the run removed it before we could
                        raise
                    self._say(str(error))
                else:
                    self.due[step] = saved

    def is_due(self, recipe: Recipe, step: int) -> bool:
        """Return whether a step is a multiple of save_period times the request's `period` (default 1)."""
        every = recipe.checkpointing.save_period * (self.request.period or 1)
        return step % every == 0

    # ---- jobs -----------------------------------------------------------------------------------------------------------

    def _start(self, recipe: Recipe, saved: Checkpoint) -> None:
        source = evaluation_sources.of_checkpoint(self.run_dir, recipe, saved, self.name)
        try:
            evaluation = evaluation_job.read(self.suite, source, self.request.overrides, self._more())
            job = run_setup.live_job(evaluation.run_dir) or evaluation_job.start(evaluation)
        except RecipeError as error:
            self.retry_at = time.monotonic() + RETRY_S
            self._say(f"step {saved.step} was not submitted: {error}")
            if any(problem.code not in ("unreachable", "in-use") for problem in error.problems):
                self._count_failure(saved.step, str(error))
            return
        self._say(f"step {saved.step}: {job.name()}")
        self.running = saved.step, evaluation, job

    def _more(self) -> dict[str, Any]:
        """Return the request's keys. If the run is in a Slurm job or allocation, the executor is Slurm by default.

        The run itself uses the GPUs of its allocation. With `auto`, an evaluation would run on this machine whenever a
        controller does not answer for a moment.
        """
        record, cluster = read_record(self.run_dir), self.request.more.get("cluster", {})
        if record is None or record.executor == "local":
            return self.request.more
        return {**self.request.more, "cluster": {"executor": "slurm", **cluster}}

    def _poll(self, step: int, evaluation: Evaluation, job: RunJob) -> None:
        status = job.status(now=run_setup.ended_well(evaluation.run_dir))
        if not status.ended:
            return
        self.running = None
        deadline = time.monotonic() + follow.SETTLE_S
        while not run_setup.ended_well(evaluation.run_dir) and time.monotonic() < deadline:
            time.sleep(0.1)
        if run_setup.ended_well(evaluation.run_dir):
            self.due.pop(step, None)
            _release_judged(evaluation.run_dir)
            scores = score_tables.read(evaluation.run_dir)
            self._say(f"step {step}: {score_tables.short(scores) if scores else 'done'}")
            return
        why = follow.failure(evaluation.run_dir, job, status)
        self._say("\n".join([f"step {step}: {why[0]}", *why[1:]]))
        self._count_failure(step, why[0])

    def _count_failure(self, step: int, why: str) -> None:
        """Count a failed attempt at a step.

        After TRIES failures, give up the step, and release its checkpoint if the run still has it.
        """
        self.tries[step] = self.tries.get(step, 0) + 1
        if self.tries[step] < TRIES:
            return
        self.failed[step] = why
        self.due.pop(step, None)
        follower_process.write_record(self.folder, self.request, self.failed)
        folder = evaluation_sources.evaluation_folder(self.run_dir, self.name, step)
        if any(saved.step == step for saved in self.seen.values()):
            waiting_checkpoints.release(folder)
        self._say(
            f"step {step} is given up after {TRIES} tries. To evaluate what it lacks: python launch/evaluate.py"
            f" run={self.run_dir} suite={self.suite} step={step}"
        )

    def _say(self, text: str) -> None:
        print(plain(text), flush=True)


def _release_judged(folder: Path) -> None:
    """Release the checkpoint of a complete evaluation.

    Keep it while answers are not judged yet, because judging them loads it again.
    """
    if evaluation_job.is_complete(folder):
        waiting_checkpoints.release(folder)
