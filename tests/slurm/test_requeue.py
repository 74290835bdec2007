"""The action after an attempt under Slurm: the same job again, possibly on other nodes, or the end. Ranks are stand-ins."""

import json
import time
from pathlib import Path

import pytest

from launch.executors.slurm import HetSlurmExecutor, HetSlurmJob
from launch.runs.attempts import all_attempts, latest
from pipeline.config import ClusterConfig, ComponentConfig, RequeueConfig
from tests.launch import tasks
from tests.launch.waiting import wait_until, wait_until_ended

pytestmark = pytest.mark.slurm
COMPONENTS = {"train": ComponentConfig(cpus_per_task=1), "generate": ComponentConfig(cpus_per_task=1)}


@pytest.fixture
def cluster(slurm_cluster, monkeypatch):
    return slurm_cluster.enter(monkeypatch)


def play(run_dir: Path, *acts: dict, requeue: RequeueConfig | None = None) -> HetSlurmJob:
    """Run these acts: what rank 0 leaves in the first, second ... attempt; see tasks.play."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "script.json").write_text(json.dumps(acts))
    cluster = ClusterConfig(time_min=5, requeue=requeue or RequeueConfig())
    return HetSlurmExecutor(run_dir, "play", cluster, COMPONENTS).submit(tasks.play, str(run_dir))


def verdicts(run_dir: Path) -> list[str | None]:
    return [attempt.verdict for attempt in all_attempts(run_dir)]


def test_the_same_job_is_requeued_until_the_run_is_complete_and_avoids_bad_nodes(cluster, tmp_path):
    acts = [{"progress": 3, "requeue": "time is short"}, {"blame": "its clock is late", "exit": 1}, {"done": 6}]
    before = time.time()
    job = play(tmp_path, *acts)
    wait_until_ended(job)

    assert job.status().state == "COMPLETED"
    attempts = all_attempts(tmp_path)
    assert [attempt.name for attempt in attempts] == [f"{job.job_id}-{restart}" for restart in range(3)]
    assert verdicts(tmp_path)[0] == "requeue: time is short"
    assert verdicts(tmp_path)[1].startswith("requeue: nodes failed their checks")
    assert verdicts(tmp_path)[2] == "done"
    for attempt, act in zip(attempts, acts, strict=True):
        said = attempt.logs[0].read_text().partition(f"{attempt.name}: {act}, ends at ")[2]
        assert int(said.split()[0]) == pytest.approx(attempt.started + 300, abs=3)
        assert attempt.started > before
    (bad,) = attempts[1].bad_nodes
    assert bad not in job.watcher.get_info(job.job_id)["NodeList"].split(",")


def test_a_cancelled_job_is_not_requeued(cluster, tmp_path):
    job = play(tmp_path, {"progress": 1, "requeue": "SIGTERM", "wait": 600})
    wait_until(lambda: latest(tmp_path) and (latest(tmp_path).folder / "requeue").exists(), "the rank's last word")
    job.cancel()
    wait_until_ended(job)

    assert job.status().state == "CANCELLED"
    assert verdicts(tmp_path) == ["stop: Slurm has ended the job"]
    wait_until(lambda: not cluster.steps_alive(), "the end of every step")


@pytest.mark.parametrize(
    ("requeue", "act", "why"),
    [
        (RequeueConfig(enabled=False), {"progress": 1, "requeue": "time is short"}, "cluster.requeue.enabled is false"),
        pytest.param(
            RequeueConfig(max_restarts=0), {"progress": 1, "exit": 9}, "max_restarts: 0", marks=pytest.mark.full
        ),  # by default: tests/launch/executors/test_verdict.py
        pytest.param(RequeueConfig(), {}, "the run is not complete", marks=pytest.mark.full),
    ],
    ids=["not wanted", "budget spent", "incomplete"],
)
def test_a_run_that_is_not_complete_has_failed(cluster, tmp_path, requeue, act, why):
    job = play(tmp_path, act, requeue=requeue)
    wait_until_ended(job)

    assert job.status().state == "FAILED"
    (verdict,) = verdicts(tmp_path)
    assert verdict.startswith("stop: ") and why in verdict


def test_a_job_whose_run_is_complete_does_nothing(cluster, tmp_path):
    """Slurm 24.11 starts a preempted job once more after it has succeeded."""
    (tmp_path / "done.json").write_text('{"step": 6}')
    job = play(tmp_path)
    wait_until_ended(job)

    assert job.status().state == "COMPLETED"
    assert not (tmp_path / "attempts").exists()
