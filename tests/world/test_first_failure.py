"""The first failure is reported first: rank 3 of 8 fails, the terminal shows that, and the job still ends."""

import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from launch.executors.local import HetLocalExecutor
from launch.executors.slurm import HetSlurmExecutor
from launch.runs.attempts import latest
from launch.runs.follow import Follower, MetricsTail
from pipeline.config import ClusterConfig, ComponentConfig
from tests.world.ranks import in_job
from tests.world.secret import write_secret

SHOWN_WITHIN_S = 10.0
WORKERS = {
    "train": ComponentConfig(ranks_per_node=2),
    "generate": ComponentConfig(ranks_per_node=3),
    "reward": ComponentConfig(ranks_per_node=3),
}


class Terminal(io.StringIO):
    """Records the time of each write."""

    def __init__(self):
        super().__init__()
        self.times: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.times.append((time.time(), text))
        return super().write(text)

    def shown(self, text: str) -> float:
        """Return the time at which the text first appeared."""
        return next(when for when, said in self.times if text in said)


@pytest.fixture(params=["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def submit(request, tmp_path, monkeypatch):
    """Start the eight ranks of a scenario and follow them. Return (job, terminal, thread that waits for the end)."""
    if request.param == "slurm":
        cluster = request.getfixturevalue("slurm_cluster")
        cluster.enter(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_secret(tmp_path)
    jobs = []

    def begin(scenario: str):
        cluster_config = ClusterConfig(time_min=5)
        if request.param == "slurm":
            executor = HetSlurmExecutor(tmp_path, "eight", cluster_config, WORKERS)
        else:
            executor = HetLocalExecutor(tmp_path, cluster_config, WORKERS)
        jobs.append(job := executor.submit(in_job, str(tmp_path), scenario))
        terminal = Terminal()
        console = Console(file=terminal, highlight=False, soft_wrap=True)
        thread = threading.Thread(target=Follower(tmp_path, job, 1, MetricsTail(tmp_path), console).follow)
        thread.start()
        return job, terminal, thread

    yield begin
    for job in jobs:
        job.cancel(check=False)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_traceback_of_rank_3_is_shown_within_10_seconds(submit, tmp_path):
    _, terminal, following = submit("fail")
    following.join(240)
    text = terminal.getvalue()
    attempt = latest(tmp_path)
    raised = float((attempt.folder / "raised").read_text())
    assert terminal.shown('raise ValueError("the engine is on fire")') - raised < SHOWN_WITHIN_S
    first = next(line for line in text.splitlines() if "rank" in line and "starting" not in line)
    assert first.startswith("rank 3 (realm generate, host ") and "verb fail): rank 3 (generate): ValueError" in first
    assert text.count("Traceback") == 1 and text.count("on fire") < 5
    assert "7 other ranks ended with it" in text
    assert terminal.shown("on fire") < terminal.shown("the run failed")
    logs = [log.read_text() for log in attempt.logs]
    assert [log.count("Traceback") for log in logs] == [0, 0, 0, 1, 0, 0, 0, 0], logs


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_rank_3_is_the_first_that_is_named(submit, tmp_path):
    _, terminal, following = submit("reduce")
    pid = _pid_of_rank_3(tmp_path)
    time.sleep(1)  # until it is in the collective
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    following.join(240)
    text = terminal.getvalue()
    first = next(line for line in text.splitlines() if "rank" in line and "starting" not in line)
    assert "rank 3 (" in first
    assert terminal.shown("rank 3 (") - killed < SHOWN_WITHIN_S
    assert "Traceback" not in text


def _pid_of_rank_3(run_dir: Path) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (attempt := latest(run_dir)) and attempt.logs and "ready" in attempt.logs[0].read_text():
            return int((attempt.folder / "pid3").read_text())
        time.sleep(0.1)
    raise AssertionError([log.read_text() for log in latest(run_dir).logs])
