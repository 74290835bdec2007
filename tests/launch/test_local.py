"""The local executor with real processes: the same environment, logs and kill domain as under Slurm."""

import os
import signal
import subprocess
import sys

import pytest

from launch.job import JobRecord, read_record, write_record
from launch.local import HetLocalExecutor, HetLocalJob, rank_environments
from pipeline.config import ComponentConfig, RecipeError
from tests.launch import tasks
from tests.launch.waiting import alive, none_alive, reports, wait_until, wait_until_ended


def executor(run_dir, time_min=5.0, **more: ComponentConfig):
    components = {
        "train": ComponentConfig(nodes=2),
        "generate": ComponentConfig(nodes=1, ranks_per_node=2, env_vars={"TEST_VAR": "set"}),
    }
    return HetLocalExecutor(run_dir, time_min, components | more)


def test_two_components_form_one_world(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
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
    (attempt,) = (tmp_path / "attempts").iterdir()
    assert {each["HETSTEP_ATTEMPT"] for each in found} == {attempt.name}
    assert attempt.name.startswith(f"local-{job.job_id}-")
    assert [path.name for path in sorted(attempt.iterdir())] == [f"rank{rank:05d}.log" for rank in range(4)]
    assert "rank 2 says hello" in (attempt / "rank00002.log").read_text()


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (tasks.fail_on_rank_1, "rank 1 (train) exited with status 1"),
        (tasks.exit_with_7_on_rank_1, "rank 1 (train) exited with status 7"),
    ],
)
def test_a_failing_rank_ends_all(tmp_path, task, reason):
    job = executor(tmp_path).submit(task, str(tmp_path))
    wait_until_ended(job)

    assert (job.status().state, job.status().reason) == ("FAILED", reason)
    none_alive(reports(tmp_path, 4))


def test_a_killed_rank_ends_all(tmp_path):
    job = executor(tmp_path).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 4)
    os.kill(found[2]["pid"], signal.SIGKILL)
    wait_until_ended(job)

    assert (job.status().state, job.status().reason) == ("FAILED", "rank 2 (generate) was ended by SIGKILL")
    none_alive(found)


def test_a_third_component_comes_last_and_its_killed_rank_is_named(tmp_path):
    job = executor(tmp_path, reward=ComponentConfig(nodes=2)).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 6)
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train"] * 2 + ["generate"] * 2 + ["reward"] * 2
    assert [each["HETSTEP_RANK"] for each in found] == ["0", "1", "2", "3", "4", "5"]
    assert {each["HETSTEP_WORLD_SIZE"] for each in found} == {"6"}
    os.kill(found[4]["pid"], signal.SIGKILL)
    wait_until_ended(job)

    assert (job.status().state, job.status().reason) == ("FAILED", "rank 4 (reward) was ended by SIGKILL")
    none_alive(found)


def test_cancel_from_another_process(tmp_path):
    """Submit in one process, which ends; attach from the run folder in another."""
    code = (
        "import sys; from pathlib import Path; from tests.launch.test_local import *; run_dir = Path(sys.argv[1]);"
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


def test_ranks_die_with_the_controller(tmp_path):
    job = executor(tmp_path).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 4)
    os.kill(int(job.job_id), signal.SIGKILL)
    wait_until_ended(job)

    assert (job.status().state, job.status().reason) == ("FAILED", "the controller was killed")
    none_alive(found)


def test_the_time_limit_ends_all(tmp_path):
    job = executor(tmp_path, time_min=0.02).submit(tasks.report_and_wait, str(tmp_path))
    wait_until_ended(job)

    assert job.status().state == "TIMEOUT" and "cluster.time_min" in job.status().reason


def test_the_controller_is_out_of_reach_of_the_terminal(tmp_path):
    job = executor(tmp_path).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 4)
    assert os.getsid(int(job.job_id)) == int(job.job_id) != os.getsid(0)
    job.cancel()
    wait_until(lambda: not alive(int(job.job_id)), "the controller's end")
    none_alive(found)


def test_a_process_id_that_is_used_again_is_not_the_job(tmp_path):
    record = JobRecord("local", str(os.getpid()), os.uname().nodename, start_time=1)
    write_record(tmp_path, record)
    job = read_record(tmp_path).attach(tmp_path)
    assert isinstance(job, HetLocalJob) and job.status().ended
    job.cancel()  # must not reach this very process


def test_each_component_and_node_has_its_own_gpus(monkeypatch):
    components = {"train": ComponentConfig(nodes=2, gpus_per_node=2), "generate": ComponentConfig(gpus_per_node=1)}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in rank_environments(components)] == ["0,1", "0,1", "2,3", "2,3", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    assert [e["CUDA_VISIBLE_DEVICES"] for e in rank_environments(components)] == ["3,4", "3,4", "5,6", "5,6", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(RecipeError, match="need 4 GPUs or more"):
        rank_environments(components)
