"""A search on a real Slurm, with trivial runs: pruned jobs are asked to stop, and a killed search goes on."""

import os
import signal

import pytest

pytest.importorskip("optuna")

from tests.launch.sweeps.suites import LR, environment, known, launch, starts, submitted, sweep, write_search
from tests.launch.sweeps.test_search import ASHA, trials
from tests.launch.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_trials_are_jobs_of_slurm_and_a_killed_search_goes_on(slurm_cluster, tmp_path):
    path = write_search(tmp_path, **ASHA, parameters={LR: [1.0, 0.5]})
    command = [f"sweep={path}", "id=x", "cluster.executor=slurm", "cluster.time_min=5"]
    env = environment(slurm_cluster.env, HETSTEP_TEST_SLEEP="4", HETSTEP_TEST_TASK="tests.launch.sweeps.tasks:climb")
    folder = tmp_path / "sweeps/some/x"
    process = launch(*command, env=env)
    wait_until(lambda: known(folder) >= 1, "the first submission")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    status, output = sweep(*command, env=env)
    assert status == 0, output
    assert trials(folder) == [("complete", 1.0, 4.0), ("pruned", 0.5, 1.0)]
    assert [*starts(folder).values()] == [1, 1] and "trial-0001: Slurm job " in output
    assert set(submitted(folder)) <= {"trial-0000", "trial-0001"}
