"""Waits for another process, with a limit that only a failure reaches."""

import json
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.05)


def wait_until_ended(job) -> None:
    wait_until(lambda: job.status(now=True).ended, f"the end of {job.name()}")


def reports(run_dir: Path, ranks: int) -> list[dict]:
    """Wait for the files of `tasks.report` of every rank; return them."""
    paths = [run_dir / f"rank{rank}.json" for rank in range(ranks)]
    wait_until(lambda: all(path.exists() and path.read_text().endswith("}") for path in paths), f"a report from {ranks} ranks")
    return [json.loads(path.read_text()) for path in paths]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def none_alive(found: list[dict]) -> None:
    wait_until(lambda: not any(alive(each["pid"]) for each in found), "the end of every rank's process", 20)
