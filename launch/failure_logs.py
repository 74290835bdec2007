"""Find what explains a failed run besides failure.json: the words of srun, of pyxis and of the rank that failed.

Under Slurm the batch script leaves two files for this in the attempt's folder: `failed_step`, the component whose step failed
first and its first rank; and `srun-COMPONENT.out`, what srun said of each component's step. The batch log has the words of all
components one after the other, and the first error in it may be that of a component that only ended with another.
"""

from __future__ import annotations

import re
from pathlib import Path

from launch.attempts import AttemptFolder
from launch.executors.base import REPORT
from launch.run_folder import RunFolder
from pipeline.config import RecipeError

ENDED_WITH_ANOTHER = re.compile(r"exit code 12[34]\b")
"""srun's line for ranks that pipeline/watchdog.py ends because another one has failed."""
TASK = re.compile(r"^srun: error: .*?\btasks? (\d+)")
PYXIS = re.compile(r"^(?:(\S+): |\[\S+\] )error: pyxis: ?(.*)")
"""(node, words), with enroot's own words after it. The node is `slurmstepd-NAME`; Slurm 26.05 has the time in its place."""
PYXIS_LINES = 12
TAIL_BYTES = 256 << 10


def failed_log_lines(run_dir: Path, attempt: AttemptFolder | None, count: int) -> list[str]:
    """Return the end of the log of the rank that failed first, or else of the one that tells most.

    count: how many lines of it at most.
    """
    log = failed_log(attempt) if attempt else None
    if log is None:
        log = log_with_traceback(run_dir, attempt.logs if attempt else [])
    return shown(log, count) if log else []


def shown(log: Path, count: int) -> list[str]:
    return [f"the end of {log}:", *(f"  {line}" for line in tail(log).splitlines()[-count:])]


def container_failure(run_dir: Path, attempt: AttemptFolder) -> list[str]:
    """Return why the container of the component that failed first did not start: its image and pyxis's words, if any."""
    component, first_rank, said = _failed_step(attempt)
    if component is None or _failed_rank_log(attempt, first_rank, said).exists():
        return []
    errors = [found for line in said if (found := PYXIS.match(line))]
    if not errors:
        return []
    words = list(dict.fromkeys(error[2].rstrip() for error in errors if error[1] == errors[0][1]))  # of one node, if it is told
    image = _image(run_dir, component)
    named = f"cluster.{component}.container_image: {image}" if image else "it has no image"
    head = f"the container of the {component} component did not start ({named}); pyxis says:"
    return [head, *(f"  {line}" for line in words[:PYXIS_LINES])]


def _image(run_dir: Path, component: str) -> str | None:
    try:
        return RunFolder.at(run_dir).value(f"cluster.{component}.container_image")
    except RecipeError:
        return None


def failed_log(attempt: AttemptFolder) -> Path | None:
    """Return the log of the Slurm task that failed first, or else srun's of its step; None if neither has a line."""
    component, first_rank, said = _failed_step(attempt)
    if component is None:
        return None
    logs = (_failed_rank_log(attempt, first_rank, said), srun_log(attempt, component))
    return next((log for log in logs if log.exists() and log.stat().st_size), None)


def _failed_step(attempt: AttemptFolder) -> tuple[str | None, int, list[str]]:
    """Return (component, its first rank, srun's lines); (None, 0, []) if no step failed first."""
    try:
        component, first_rank = (attempt.folder / "failed_step").read_text().split()
    except (FileNotFoundError, ValueError):
        return None, 0, []
    log = srun_log(attempt, component)
    return component, int(first_rank), tail(log).splitlines() if log.exists() else []


def srun_log(attempt: AttemptFolder, component: str) -> Path:
    return attempt.folder / f"srun-{component}.out"


def _failed_rank_log(attempt: AttemptFolder, first_rank: int, said: list[str]) -> Path:
    task = next((int(found[1]) for line in said if (found := TASK.match(line))), 0)
    return attempt.folder / f"rank{first_rank + task:05d}.log"


def failed_step(batch_log: Path, attempts: int, realm: str | None = None) -> list[str]:
    """Return srun's line for the first task that failed and the batch script's for its component, in the last of `attempts`.

    Each attempt before that has left its verdict in the log.

    realm: of the rank that failed first, where failure.json says so. Then tasks that ended because of another one, and other
    components, are left out: srun often tells of them first.
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
    """Return the log with a traceback that ended first, or else the executor's own."""
    by_last_word = sorted(logs, key=lambda path: path.stat().st_mtime)
    for log in by_last_word:
        if "Traceback (most recent call last)" in tail(log):
            return log
    own = sorted((run_dir / "submitit").glob("*.log*"), key=lambda path: path.stat().st_mtime) + sorted(
        (run_dir / "submitit").glob("*_log.out"), key=lambda path: path.stat().st_mtime
    )
    return next((log for log in reversed(own) if log.stat().st_size), None)


def tail(log: Path) -> str:
    """Return the last TAIL_BYTES."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        return file.read().decode(errors="replace")
