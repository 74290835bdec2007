"""Run `launch/submit.py` and the local executor's controller in forks of a process that has imported the pipeline.

They are the same processes as in a run from the shell. Only their imports are done already, which take longer than the run of a
tiny model.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

from launch import submit
from launch.executors import forks, local

FAULTS = Path(__file__).parent / "faults"


def run(arguments: list[str]) -> int:
    """Run `python launch/submit.py ARGUMENTS`; return the exit status."""
    if os.environ.get("HETSTEP_TEST_FAULT") or os.environ.get("HETSTEP_TEST_NCCL"):
        sys.path.insert(0, str(FAULTS))
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    with unittest.mock.patch.object(local, "start_controller", forked):
        return submit.main(arguments)


@dataclass
class Child:
    """A child process, with the part of `subprocess.Popen` that the local executor uses."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.returncode = 0
        return self.returncode


def forked(run_dir: Path, environment: dict[str, str], log: Path) -> Child:
    """Do what `local.start_controller` does, by a fork."""
    with open(log, "ab") as output:
        return Child(forks.start(lambda: os._exit(local.control(run_dir)), environment, output, lambda: None))
