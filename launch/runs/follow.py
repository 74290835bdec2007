"""Show the progress of a run, and its result: a live view on a terminal, one plain line per step elsewhere.

The first failure of an attempt is shown as soon as its rank reports it, before the job ends. Only the run folder
(metrics.jsonl, done.json, logs, files of attempts) and the job's state are read, so any run can be followed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.executors.executor import JobStatus, RunJob
from launch.runs import resources, run_files, startup_stages
from launch.runs.attempts import AttemptFolder, all_attempts, of_job
from launch.runs.evaluation_progress import AnswerCounts, evaluates
from launch.runs.failure_logs import container_failure, failed_log_lines, failed_step, killed_lines, log_end, tail
from launch.runs.run_folder import RunFolder
from launch.terminal.rich_console import rich_console
from launch.terminal.safe_text import plain
from pipeline.observe.metrics import Reader
from pipeline.observe.warning_file import LOST_EPISODES
from pipeline.recipe.problems import RecipeError

FAULT_METRICS = ("train/broke_judge", "train/env_failures", "val/broke_judge", "val/env_failures", "data/records_dropped")
"""Metrics that count failed judges, failed environments and dropped records. They are shown only if they are not 0."""
SHOWN_METRICS = (
    "train/reward",
    "train/accuracy",
    *FAULT_METRICS,
    "train/loss",
    "train/teacher_kl",
    "val/accuracy",
    "val/reward",
    "val/loss",
    "time/step",
    "time/rollout",
    "time/train",
    "time/refit",
    "throughput/tokens_per_s",
)
EVENTS = ("start", "failure", "verdict")
"""Kinds of events of an attempt. Each event is printed once."""
POLL_S = 0.5
LOG_LINES = 30
TRACEBACK_LINES = 60
RANK_LOG_LINES = 10
"""Lines shown of the log of a rank that did not raise."""
SETTLE_S = 5.0
"""How late done.json may appear on a shared file system, after the job has ended."""


class MetricsTail:
    """Reads metrics.jsonl while it grows, and keeps the latest value of each metric and the pace."""

    def __init__(self, run_dir: Path):
        self.reader = Reader(run_dir / "metrics.jsonl")
        self.step = 0
        self.latest: dict[str, float] = {}  # by key
        self.pace: deque[tuple[int, float]] = deque(maxlen=20)  # (step, unix time)

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines since the last call. Raises RecipeError for a malformed line."""
        lines = list(self.reader.lines())
        for line in lines:
            self._update(line)
        return lines

    def _update(self, line: dict[str, Any]) -> None:
        self.step = line["step"]
        self.latest.update({key: value for key, value in line.items() if value is not None})
        if self.pace and self.pace[-1][0] >= self.step:  # a validation at the same step, or a resumed run
            self.pace = deque((p for p in self.pace if p[0] < self.step), maxlen=self.pace.maxlen)
        self.pace.append((self.step, line["time"]))

    def seconds_left(self, max_steps: int) -> float | None:
        """Return the seconds left at the mean pace of the latest steps; None before there are two."""
        if len(self.pace) < 2 or self.pace[-1][0] == self.pace[0][0]:
            return None
        (first, begin), (last, end) = self.pace[0], self.pace[-1]
        return (max_steps - last) * (end - begin) / (last - first)


def _metrics_to_show(line: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics to show. val/reward is shown only if the environments report no accuracy."""
    metrics = {key: line[key] for key in SHOWN_METRICS if line.get(key) is not None and (line[key] or key not in FAULT_METRICS)}
    if "val/accuracy" in metrics:
        metrics.pop("val/reward", None)
    return metrics


class Follower:
    """Prints a job's progress and events until it ends."""

    def __init__(self, run_dir: Path, job: RunJob, max_steps: int | None, metrics: MetricsTail, console: Console | None = None):
        """Follow the run from now on.

        max_steps: None if unknown. metrics: lines that this reader has already read are not shown.
        """
        self.run_dir = run_dir
        self.job = job
        self.max_steps = max_steps
        self.console = console or rich_console(soft_wrap=True)
        self.metrics = metrics
        self.answers = AnswerCounts(run_dir)
        self.last_line = ""  # "steps" once a step has been printed
        self.printed = {(attempt.name, event) for attempt in of_job(run_dir, job.job_id) if attempt.verdict for event in EVENTS}

    def follow(self, timeout_s: float | None = None) -> bool:
        """Show progress until the job ends, and return whether the run succeeded. Ctrl-C raises KeyboardInterrupt.

        Raises TimeoutError if the job has not ended after `timeout_s`; None: no limit.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self.console.is_terminal:
            with Live(console=self.console, auto_refresh=False, transient=True) as live:
                status = self._watch(lambda status, _: live.update(self._view(status), refresh=True), deadline)
        else:
            status = self._watch(self._print_lines, deadline)
        return self._verdict(status)

    def _watch(self, show: Callable[[JobStatus, list[dict[str, Any]]], None], deadline: float | None) -> JobStatus:
        while True:
            attempts = of_job(self.run_dir, self.job.job_id)
            self._print_events(attempts)
            failed = bool(attempts) and attempts[-1].failure is not None
            status = self.job.status(now=failed or (self.run_dir / "done.json").exists())
            show(status, lines := self.metrics.new_lines())
            if lines:
                self._print_lost_episodes()
            if status.ended:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.job.name()} has not ended: {status}")
            time.sleep(POLL_S)

    def _print_events(self, attempts: list[AttemptFolder]) -> None:
        """Print the attempts' events that were not printed before, above the live view or between the plain lines."""
        for number, attempt in enumerate(attempts):
            step = max((earlier.progress for earlier in attempts[:number]), default=0)
            verdict = attempt.verdict or ""
            for event, lines in (
                ("start", [f"attempt {attempt.name}: all ranks start again, {self._since(step)}"] if number else []),
                ("failure", first_failure(attempt) if attempt.failure else []),
                ("verdict", [f"attempt {attempt.name} ended; {verdict}"] if verdict.startswith("requeue") else []),
            ):
                if lines and (attempt.name, event) not in self.printed:
                    self.printed.add((attempt.name, event))
                    self._print("\n".join(lines))

    def _print_lost_episodes(self) -> None:
        """Print why environments lose episodes, each warning once."""
        try:
            warnings = resources.warnings(RunFolder.at(self.run_dir))
        except RecipeError:  # the run's recipe cannot be read yet
            return
        for warned in warnings:
            event = (warned["check"], str(warned["step"]))
            if warned["check"].startswith(LOST_EPISODES) and event not in self.printed:
                self.printed.add(event)
                self._print(warned.get("message", ""), "yellow")

    def _since(self, progress: int) -> str:
        return f"with {progress} answers kept" if evaluates(self.run_dir) else f"from step {progress}"

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(plain(text), style=style))

    # ---- progress -------------------------------------------------------------------------------------------------------

    def _waiting(self, status: JobStatus) -> str:
        """Return a line about the job's state. It names no durations, so the same state gives the same line, printed once."""
        doing = startup_stages.now(startup_stages.stages(self.run_dir)) if status.state == "RUNNING" else ""
        doing = doing or self.answers.text()
        return f"{self.job.name()}: {status}{': ' if doing else ''}{doing}"

    def _print_lines(self, status: JobStatus, lines: list[dict[str, Any]]) -> None:
        waiting = self._waiting(status)
        if not lines and waiting != self.last_line and not status.ended and self.last_line != "steps":
            self._print(waiting)
            self.last_line = waiting
        if (
            lines
            and self.last_line not in ("", "steps")
            and (stages_text := startup_stages.text(startup_stages.stages(self.run_dir)))
        ):
            self._print(f"start-up: {stages_text}")
        for line in lines:
            self.last_line = "steps"
            self._print("  ".join([self._at(line["step"]), *self._values(line), *self._eta()]))

    def _at(self, step: int) -> str:
        return f"step {step}" if self.max_steps is None else f"step {step}/{self.max_steps}"

    def _values(self, line: dict[str, float]) -> list[str]:
        return [f"{key} {value:.4g}" for key, value in _metrics_to_show(line).items()]

    def _eta(self) -> list[str]:
        seconds = None if self.max_steps is None else self.metrics.seconds_left(self.max_steps)
        return [] if seconds is None else [f"left {timedelta(seconds=round(seconds))}"]

    def _view(self, status: JobStatus) -> Group | Text:
        if not self.metrics.step:
            stages_text = startup_stages.text(startup_stages.stages(self.run_dir)) if status.state == "RUNNING" else ""
            parts = filter(None, [f"{self.job.name()}: {status}", stages_text, self.answers.text()])
            return Text(plain(": ".join(parts)))
        head = "  ".join([self._at(self.metrics.step), *self._eta(), f"{self.job.name()}: {status}"])
        table = Table.grid(padding=(0, 2))
        for key, value in _metrics_to_show(self.metrics.latest).items():
            table.add_row(key, f"{value:.4g}")
        if self.max_steps is None:
            return Group(Text(plain(head)), table)
        bar = Table.grid()  # ends the line, which a bar alone does not
        bar.add_row(ProgressBar(total=self.max_steps, completed=self.metrics.step, width=60))
        return Group(Text(plain(head)), bar, table)

    # ---- the end --------------------------------------------------------------------------------------------------------

    def _verdict(self, status: JobStatus) -> bool:
        done_file = self.run_dir / "done.json"
        deadline = time.monotonic() + SETTLE_S
        while status.state in ("COMPLETED", "GONE") and not done_file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        record = run_files.completion(done_file) if status.state in ("COMPLETED", "GONE") else None
        if record is not None:
            end_text = "all answers" if evaluates(self.run_dir) else f"step {record['step']}"
            self._print(f"done: {end_text}, in {self.run_dir}", "green")
            return True
        first, *further = failure(self.run_dir, self.job, status, self.printed)
        self._print(first, "bold red")
        self._print("\n".join(further))
        return False


# ---- failures -----------------------------------------------------------------------------------------------------------


def first_failure(attempt: AttemptFolder) -> list[str]:
    """Return lines about an attempt's failure.json: the rank, its traceback or the end of its log, and the folder of logs.

    The traceback of a RecipeError, whose message is enough, is left out.
    """
    first = attempt.failure
    assert first is not None, "the caller has seen failure.json"
    lines = [f"rank {first['rank']} ({run_files.where(first)}): {first['message']}"]
    lines += [] if first.get("traceback") else killed_lines(attempt)
    log = attempt.folder / f"rank{first['rank']:05d}.log"
    traceback = first.get("traceback")
    if traceback and not _says_what_to_change(first):
        lines += [f"  {line}" for line in traceback.splitlines()[-TRACEBACK_LINES:]]
    elif not traceback and log.exists() and tail(log):
        lines += log_end(log, RANK_LOG_LINES)
    if other_logs := len(attempt.logs) - 1:
        lines += [f"{other_logs} other rank{'s' if other_logs > 1 else ''} ended with it; logs: {attempt.folder}"]
    return lines


def _says_what_to_change(first: run_files.FailureRecord) -> bool:
    return f"{RecipeError.__name__}: " in first["message"]


def failure(run_dir: Path, job: RunJob, status: JobStatus, printed: AbstractSet[tuple[str, str]] = frozenset()) -> list[str]:
    """Return lines that say why the run ended and how to continue it.

    The lines have the launcher's reason, a container that did not start, and the latest attempt's failure.json or else the end
    of the most useful log.

    printed: (attempt, "failure") pairs of the attempts whose failure was printed before, and is left out
    """
    attempts = of_job(run_dir, job.job_id)
    attempt = attempts[-1] if attempts else None
    verdict = (attempt.verdict or "") if attempt else ""
    lines = [f"the run failed: {job.name()} is {status}"]
    if status.succeeded or (attempt and verdict and attempt.failure is None and attempt.requeue_reason):
        lines = [f"{job.name()} ended ({status}), but the run is not complete: there is no done.json"]
    if attempt and verdict.startswith("stop: ") and verdict[6:] not in status.reason:
        lines += [f"attempt {attempt.name}: {verdict[6:]}"]
    first = attempt.failure if attempt else None
    lines += failed_step(run_dir / f"submitit/{job.job_id}_0_log.out", len(attempts), first.get("realm") if first else None)
    logs = attempt.logs if attempt else []
    container_lines = container_failure(run_dir, attempt) if attempt else []
    lines += container_lines
    if attempt and attempt.failure:
        if (attempt.name, "failure") not in printed:
            lines += first_failure(attempt)
    elif not container_lines and (not attempt or not attempt.requeue_reason):
        lines += failed_log_lines(run_dir, attempt, LOG_LINES)
    lines += [f"logs: {logs[0].parent if logs else run_dir / 'submitit'}"]
    if step := max((attempt_folder.progress for attempt_folder in all_attempts(run_dir)), default=0):
        if evaluates(run_dir):
            lines += [f"{step} answers are kept: the same command asks for the others"]
        elif first is None or not _says_what_to_change(first):
            lines += [f"there is a checkpoint of step {step}: the same command continues from it"]
    return lines
