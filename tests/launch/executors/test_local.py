"""The local executor with real processes: the same environment, logs and joint termination as under Slurm."""

import json
import os
import signal
import subprocess
import sys

import pytest

from launch.executors.local import HetLocalExecutor, HetLocalJob, rank_environments
from launch.executors.record import JobRecord, read_record, write_record
from launch.runs.attempts import all_attempts
from pipeline.config import ClusterConfig, ComponentConfig, RequeueConfig
from tests.launch import tasks
from tests.launch.waiting import alive, none_alive, reports, wait_until, wait_until_ended
from tests.problems import refused

NO_PROGRESS = ", without a new checkpoint since its start"


def executor(run_dir, cluster=None, **more: ComponentConfig):
    components = {
        "train": ComponentConfig(nodes=2),
        "generate": ComponentConfig(nodes=1, ranks_per_node=2, env_vars={"TEST_VAR": "set"}),
    }
    return HetLocalExecutor(run_dir, cluster or ClusterConfig(time_min=5), components | more)


def test_two_components_form_one_world(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "done.json").write_text('{"step": 4}')
    job = executor(tmp_path).submit(tasks.report, str(tmp_path))
    wait_until_ended(job)

    assert job.status().succeeded
    found = reports(tmp_path, 4)
    assert [each["HETSTEP_RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [each["HETSTEP_LOCAL_RANK"] for each in found] == ["0", "0", "0", "1"]
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train", "train", "generate", "generate"]
    assert [each["TEST_VAR"] for each in found] == [None, None, "set", "set"]
    for key, value in {
        "HETSTEP_WORLD_SIZE": "4",
        "HETSTEP_MASTER_ADDR": "127.0.0.1",
        "HETSTEP_RUN_DIR": str(tmp_path),
        "HETSTEP_JOB_ID": job.job_id,
        "OMP_NUM_THREADS": "1",
    }.items():
        assert {each[key] for each in found} == {value}
    (end,) = {float(each["HETSTEP_END_TIME"]) for each in found}
    (attempt,) = (tmp_path / "attempts").iterdir()
    assert {each["HETSTEP_ATTEMPT"] for each in found} == {attempt.name}
    assert attempt.name.startswith(f"local-{job.job_id}-")
    assert [path.name for path in sorted(attempt.glob("*"))] == [
        *(f"rank{rank:05d}.log" for rank in range(4)),
        "signals",
        "started",
        "verdict",
    ]
    assert end - float((attempt / "started").read_text()) == pytest.approx(300, abs=1)
    assert "rank 2 says hello" in (attempt / "rank00002.log").read_text()


@pytest.mark.full  # by default: on Slurm
def test_a_third_component_comes_last_and_its_killed_rank_is_named(tmp_path):
    job = executor(tmp_path, reward=ComponentConfig(nodes=2)).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 6)
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train"] * 2 + ["generate"] * 2 + ["reward"] * 2
    assert [each["HETSTEP_RANK"] for each in found] == ["0", "1", "2", "3", "4", "5"]
    assert {each["HETSTEP_WORLD_SIZE"] for each in found} == {"6"}
    os.kill(found[4]["pid"], signal.SIGKILL)
    wait_until_ended(job)

    why = f"rank 4 (reward) was ended by SIGKILL; crashed with status 137{NO_PROGRESS}"
    assert (job.status().state, job.status().reason) == ("FAILED", why)
    none_alive(found)


def test_cancel_from_another_process(tmp_path):
    """Submit in one process, which ends; attach from the run folder in another."""
    code = (
        "import sys; from pathlib import Path; from tests.launch.executors.test_local import *; run_dir = Path(sys.argv[1]);"
        "write_record(run_dir, JobRecord.of('local', executor(run_dir).submit(tasks.report_and_wait, sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    found = reports(tmp_path, 4)
    job = read_record(tmp_path).attach(tmp_path)
    assert job.status().state == "RUNNING"
    job.cancel()
    wait_until_ended(job)

    assert (job.status().state, job.status().reason) == ("CANCELLED", "by SIGTERM")
    none_alive(found)


def test_ranks_end_with_the_controller(tmp_path):
    job = executor(tmp_path).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 4)
    os.kill(int(job.job_id), signal.SIGKILL)
    wait_until_ended(job)

    assert (job.status().state, job.status().reason) == ("FAILED", "the controller was killed")
    none_alive(found)


def test_the_time_limit_ends_all_ranks(tmp_path):
    job = executor(tmp_path, ClusterConfig(time_min=0.02)).submit(tasks.report_and_wait, str(tmp_path))
    wait_until_ended(job)

    assert job.status().state == "TIMEOUT" and "cluster.time_min" in job.status().reason


# ---- restarts -------------------------------------------------------------------------------------------------------------


def play(run_dir, *acts, cluster=None):
    """Run these scripted attempts with a rank of each component; return the job's end, and the verdict on each of its
    attempts.
    """
    run_dir.mkdir(exist_ok=True)
    (run_dir / "script.json").write_text(json.dumps(acts))
    components = {"train": ComponentConfig(), "generate": ComponentConfig()}
    job = HetLocalExecutor(run_dir, cluster or ClusterConfig(), components).submit(tasks.play, str(run_dir))
    wait_until_ended(job)
    own = [attempt for attempt in all_attempts(run_dir) if attempt.name.startswith(f"local-{job.job_id}-")]
    assert [attempt.name.rpartition("-")[2] for attempt in own] == [str(restart) for restart in range(len(own))]
    assert all(len(attempt.logs) == 2 for attempt in own)  # nothing is written over
    return job.status(), [attempt.verdict for attempt in own]


def test_ranks_are_started_again_as_another_attempt_until_the_run_is_complete(tmp_path):
    acts = {"progress": 3, "requeue": "time is short"}, {"progress": 5, "exit": 1}, {"done": 6}
    status, verdicts = play(tmp_path / "run", *acts)
    assert status.succeeded
    assert verdicts == [
        "requeue: time is short",
        "requeue: crashed with status 1, after checkpoint 5; restart 1 of 3",
        "done",
    ]


@pytest.mark.full
def test_a_rank_that_overruns_the_time_limit_has_crashed(tmp_path):
    """Each attempt has the whole limit for itself."""
    overrun = {"progress": 1, "wait": 600}
    cluster = ClusterConfig(time_min=0.12, requeue=RequeueConfig(max_restarts=1))
    status, verdicts = play(tmp_path / "run", overrun, overrun, cluster=cluster)
    assert status.state == "TIMEOUT" and "cluster.time_min" in status.reason
    assert verdicts[0].startswith("requeue: crashed with status 124, after checkpoint 1")
    assert verdicts[1].startswith("stop: ")


def test_ranks_that_exit_with_0_before_the_run_is_complete_have_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("HETSTEP_SETTLE_S", "0")
    status, (verdict,) = play(tmp_path / "run", {})
    assert status.state == "FAILED" and "the run is not complete" in status.reason
    assert verdict == f"stop: {status.reason}"


@pytest.mark.full
def test_the_controller_is_out_of_reach_of_the_terminal(tmp_path):
    job = executor(tmp_path).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 4)
    assert os.getsid(int(job.job_id)) == int(job.job_id) != os.getsid(0)
    job.cancel()
    wait_until(lambda: not alive(int(job.job_id)), "the controller's end")
    none_alive(found)


def test_a_reused_process_id_is_not_the_job(tmp_path):
    record = JobRecord("local", str(os.getpid()), os.uname().nodename, start_time=1)
    write_record(tmp_path, record)
    job = read_record(tmp_path).attach(tmp_path)
    assert isinstance(job, HetLocalJob) and job.status().ended
    job.cancel()  # must not reach this very process


def has_gpus(monkeypatch, folder, count: int) -> None:
    """Put an nvidia-smi first on PATH that answers like a driver with this many GPUs."""
    script = folder / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'\n" for i in range(count)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_each_component_and_node_has_its_own_gpus(monkeypatch, tmp_path):
    has_gpus(monkeypatch, tmp_path, 8)
    components = {"train": ComponentConfig(nodes=2, gpus_per_node=2), "generate": ComponentConfig(gpus_per_node=1)}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in rank_environments(components)] == ["0,1", "0,1", "2,3", "2,3", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    assert [e["CUDA_VISIBLE_DEVICES"] for e in rank_environments(components)] == ["3,4", "3,4", "5,6", "5,6", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with refused(("cluster.train.gpus_per_node", "too-large")):
        rank_environments(components)


@pytest.mark.parametrize(
    ("there", "visible", "shown"), [(0, None, 0), (0, "0,1", 0), (2, "0,5,1", 1), (2, "-1", 0), (2, "", 0), (2, "GPU-1", 1)]
)
def test_missing_gpus_are_refused(monkeypatch, tmp_path, there, visible, shown):
    """Check also CUDA_VISIBLE_DEVICES, which CUDA reads up to the first missing device."""
    has_gpus(monkeypatch, tmp_path, there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with refused(("cluster.train.gpus_per_node", "too-large")):
        rank_environments({"train": ComponentConfig(gpus_per_node=shown + 1)})
    assert len(rank_environments({"train": ComponentConfig(gpus_per_node=shown, ranks_per_node=1)})) == 1
