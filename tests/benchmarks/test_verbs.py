"""The benchmark of verbs runs on the current store and relays."""

import os
import subprocess
import sys

import pytest

from launch.executors.executor import ROOT


@pytest.mark.full
def test_the_verbs_of_64_ranks_are_measured():
    command = [sys.executable, "-m", "tests.benchmarks.verbs", "64"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert "64 ranks: verb " in run.stdout and "[5] of verb hang named" in run.stdout
