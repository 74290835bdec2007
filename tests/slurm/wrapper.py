"""launch/hetstep.sbatch and launch/submit.py with ranks that do one of the tests' tasks instead of the pipeline."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.executors.executor import ROOT

# Arguments: the task's name, then those of the command.
SUBMIT = (
    "import sys; from launch import submit; from launch.executors import rank_task; from tests.launch import tasks;"
    " rank_task.rank_main = getattr(tasks, sys.argv[1]); sys.exit(submit.main(sys.argv[2:]))"
)
BATCH = SUBMIT.replace("submit.main(", "hetstep_sbatch.main(").replace("import submit", "import hetstep_sbatch, submit")


def sbatch(here: Path, options: str, task: str, *overrides: str, recipe: str = "tiny.yaml") -> tuple[str, Callable[[], str]]:
    """Submit the wrapper from the current folder; return the job's id and its output so far."""
    python = here / "python"  # the wrapper gives it launch/hetstep_sbatch.py first, in whose place this comes
    python.write_text(f"#!/bin/bash\nshift\nPYTHONPATH='{ROOT}' exec '{sys.executable}' -c '{BATCH}' {task} \"$@\"\n")
    python.chmod(0o755)
    command = ["sbatch", "--parsable", f"--export=ALL,HETSTEP_PYTHON={python}", f"--output={here}/%j.out", *options.split()]
    wrapper = [str(ROOT / "launch/hetstep.sbatch"), f"recipe={recipe}", *overrides]
    job = subprocess.run([*command, *wrapper], capture_output=True, text=True, check=True).stdout.strip()
    out = here / f"{job}.out"
    return job, lambda: out.read_text() if out.exists() else ""


def wait_for(text: str, out: Callable[[], str], seconds: float = 60.0) -> None:
    """Wait for a condition. Raises AssertionError with all that the job has printed."""
    deadline = time.monotonic() + seconds
    while text not in out():
        assert time.monotonic() < deadline, f"no '{text}' in {seconds:.0f} s:\n{out()}"
        time.sleep(0.05)
