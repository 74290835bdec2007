"""Find the log lines that explain a failed run, beside failure.json: of srun, of the container runtime and of the failed rank.

Under Slurm the batch script writes two files into the attempt's folder: `failed_step`, with the component whose step failed
first and its first rank; and `srun-COMPONENT.out`, srun's output for each component's step. The batch log has the output of all
components in sequence, and its first error may be of a component that ended because another one failed.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from launch.executors.containers.runtime import lacking
from launch.executors.containers.runtimes import RUNTIMES
from launch.executors.executor import REPORT
from launch.executors.local import KILLED
from launch.runs.attempts import AttemptFolder
from launch.runs.run_folder import RunFolder
from pipeline.config import RecipeError
from pipeline.files import small_files
from pipeline.recipe import user_files

ENDED_WITH_ANOTHER = re.compile(r"exit code 12[34]\b")
"""Matches srun's line about ranks that pipeline/job/watchdog.py ended because another rank failed."""
TASK = re.compile(r"^srun: error: .*?\btasks? (\d+)")
START_LINES = 12
TASK_KILLED = re.compile(r"oom_kill|oom-kill|OOM Killed|Out Of Memory|\bKilled$", re.I)
"""Matches lines of srun and slurmstepd about killed tasks, such as `Detected 1 oom_kill event in StepId=17.0`."""
KILLED_LINES = 4
TAIL_BYTES = 256 << 10


def failed_log_lines(run_dir: Path, attempt: AttemptFolder | None, count: int) -> list[str]:
    """Return a heading and the last `count` lines of the log of the rank that failed first, or else of the most useful log.

    A last line says what the rank's image lacks, if the log shows that.
    """
    log = failed_log(attempt) if attempt else None
    if log is None:
        log = log_with_traceback(run_dir, attempt.logs if attempt else [])
    lines = log_end(log, count) if log else []
    component = _failed_step(attempt)[0] if attempt else None
    if component and _value(run_dir, f"cluster.{component}.container_image") and (why := lacking(component, lines[-2:])):
        lines.append(f"  cause: {why}")
    return lines


def killed_lines(attempt: AttemptFolder) -> list[str]:
    """Return lines about ranks that a signal ended, as the local controller or Slurm recorded them; [] if nothing is known."""
    with contextlib.suppress(OSError):
        return [(attempt.folder / KILLED).read_text().strip()]
    lines = (line for log in sorted(attempt.folder.glob("srun-*.out")) for line in tail(log).splitlines())
    return list(dict.fromkeys(line for line in lines if TASK_KILLED.search(line)))[:KILLED_LINES]


def log_end(log: Path, count: int) -> list[str]:
    """Return a heading and the last `count` lines of a log."""
    return [f"the end of {log}:", *(f"  {line}" for line in tail(log).splitlines()[-count:])]


def container_failure(run_dir: Path, attempt: AttemptFolder) -> list[str]:
    """Return lines with the image and its runtime's errors if the first failed component's container did not start; else []."""
    component, first_rank, srun_lines = _failed_step(attempt)
    if component is None or _failed_rank_log(attempt, first_rank, srun_lines).exists():
        return []
    runtime = RUNTIMES[_value(run_dir, "cluster.container_runtime") or "pyxis"]
    errors = runtime.start_errors(srun_lines)
    if not errors:
        return []
    image = _value(run_dir, f"cluster.{component}.container_image")
    named = f"cluster.{component}.container_image: {image}" if image else "it has no image"
    head = f"the container of the {component} component did not start ({named}); {runtime.name} reports:"
    cause = [f"  cause: {text}"] if (text := runtime.cause(errors)) else []
    return [head, *(f"  {line}" for line in errors[:START_LINES]), *cause]


def _value(run_dir: Path, key: str) -> str | None:
    try:
        return RunFolder.at(run_dir).value(key)
    except RecipeError:
        return None


def failed_log(attempt: AttemptFolder) -> Path | None:
    """Return the log of the Slurm task that failed first, or else srun's log of its step; None if both are empty or missing."""
    component, first_rank, srun_lines = _failed_step(attempt)
    if component is None:
        return None
    logs = (_failed_rank_log(attempt, first_rank, srun_lines), srun_log(attempt, component))
    return next((log for log in logs if log.exists() and log.stat().st_size), None)


def _failed_step(attempt: AttemptFolder) -> tuple[str | None, int, list[str]]:
    """Return (component, first rank, srun's lines) of the step that failed first; (None, 0, []) if no step failed."""
    try:
        component, number = (small_files.read_text(attempt.folder / "failed_step") or "").split()
        first_rank = int(number)
    except ValueError:
        return None, 0, []
    log = srun_log(attempt, component)
    return component, first_rank, tail(log).splitlines() if log.exists() else []


def srun_log(attempt: AttemptFolder, component: str) -> Path:
    """Return the path of srun's output for a component's step."""
    return attempt.folder / f"srun-{component}.out"


def _failed_rank_log(attempt: AttemptFolder, first_rank: int, srun_lines: list[str]) -> Path:
    task = next((int(match[1]) for line in srun_lines if (match := TASK.match(line))), 0)
    return attempt.folder / f"rank{first_rank + task:05d}.log"


def failed_step(batch_log: Path, attempts: int, realm: str | None = None) -> list[str]:
    """Return the lines of a batch log about the first failure of the last attempt.

    They are srun's line about the failed task and the batch script's line about the task's component. attempts: number of
    attempts in the log; each but the last ends with its verdict. realm: the realm of the rank that failed first, if
    failure.json names it. Lines about other components, and about tasks that ended because of another rank, are then left out,
    because srun often reports these first.
    """
    if not batch_log.exists():
        return []
    lines = tail(batch_log).splitlines()
    verdicts = [number for number, line in enumerate(lines) if line.startswith("requeue: ")]
    begin = verdicts[: attempts - 1][-1] if verdicts[: attempts - 1] else 0
    lines = [line for line in lines[begin:] if line.startswith((REPORT, "srun: error:"))]
    if realm:
        lines = [line for line in lines if not ENDED_WITH_ANOTHER.search(line)]
        lines = [line for line in lines if not line.startswith(REPORT) or f"the {realm} component" in line]
    task = next((line for line in lines if " task" in line and not line.startswith(REPORT)), None)
    component = next((line for line in lines if line.startswith(REPORT)), None)
    return [line for line in (task, component) if line]


def log_with_traceback(run_dir: Path, logs: list[Path]) -> Path | None:
    """Return the least recently written log with a traceback, or else the executor's newest log."""
    oldest_first = sorted(logs, key=lambda path: path.stat().st_mtime)
    for log in oldest_first:
        if "Traceback (most recent call last)" in tail(log):
            return log
    executor_logs = sorted((run_dir / "submitit").glob("*.log*"), key=lambda path: path.stat().st_mtime) + sorted(
        (run_dir / "submitit").glob("*_log.out"), key=lambda path: path.stat().st_mtime
    )
    return next((log for log in reversed(executor_logs) if log.stat().st_size), None)


def tail(log: Path) -> str:
    """Return the last TAIL_BYTES of a log."""
    with user_files.open_file(log) as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        return file.read().decode(errors="replace")
