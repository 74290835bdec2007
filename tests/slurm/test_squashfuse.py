"""Effects of signals on ranks whose root file system depends on squashfuse, as with pyxis's use_squashfuse=1.

squashfuse is a stand-in (pyxis_stub.c): a process of the step that ends on SIGCONT, SIGTERM and SIGUSR2 and takes its rank
along. Slurm is real, and its process tracking is linuxproc, which signals all processes of a step.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.executors.executor import ROOT
from launch.executors.slurm import HetSlurmExecutor, HetSlurmJob
from launch.runs.attempts import AttemptFolder, all_attempts
from pipeline.config import ClusterConfig, ComponentConfig, RequeueConfig
from tests.launch import tasks
from tests.launch.model import write_recipe
from tests.launch.waiting import reports, wait_until_ended
from tests.slurm import pyxis
from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.wrapper import sbatch, wait_for

on_slurm = pytest.mark.slurm
PARTITIONS = """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF"""
SETTINGS = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nSlurmctldParameters=preempt_send_user_signal"


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    if lacking := [*missing(), *pyxis.missing()]:
        (pytest.fail if os.environ.get("HETSTEP_REQUIRE_SLURM") == "1" else pytest.skip)(f"not here: {lacking}")
    folder = tmp_path_factory.mktemp("squashfuse")
    with pyxis.cluster(folder, 2, squashfuse=True, partitions=PARTITIONS, settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def cluster(own_cluster, monkeypatch) -> SlurmCluster:
    own_cluster.enter(monkeypatch)
    monkeypatch.setenv("HETSTEP_SETTLE_S", "1")
    return own_cluster


def submit(run_dir: Path, task) -> HetSlurmJob:
    """Submit two components of one rank, each in a container, without requeue."""
    image = str(pyxis.image(run_dir / "x.sqsh"))
    components = {name: ComponentConfig(container_image=image) for name in ("train", "generate")}
    cluster = ClusterConfig(time_min=30, requeue=RequeueConfig(enabled=False))
    return HetSlurmExecutor(run_dir, "squashfuse", cluster, components).submit(task, str(run_dir))


def slurm(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def left(run_dir: Path, why: str) -> None:
    """Check that all ranks have left with everything saved."""
    (attempt,) = all_attempts(run_dir)
    assert attempt.verdict == f"stop: {why}; cluster.requeue.enabled is false", log(attempt)
    assert attempt.progress == 7


def log(attempt: AttemptFolder) -> str:
    return "\n".join(path.read_text() for path in (attempt.folder.parents[1] / "submitit").glob("*_log.out"))


@pytest.mark.full
@on_slurm
def test_a_signal_to_a_step_ends_its_ranks(cluster, tmp_path):
    """This shows that the stand-in has the fault, without which the other tests would show nothing."""
    job = submit(tmp_path, tasks.save_on_request)
    reports(tmp_path, 2)
    slurm("scancel", "--signal=USR2", job.job_id)
    wait_until_ended(job)
    (attempt,) = all_attempts(tmp_path)
    assert not attempt.progress and "Bus error" in log(attempt)


@on_slurm
@pytest.mark.parametrize("number", ["USR2", pytest.param("TERM", marks=pytest.mark.full)])
def test_a_signal_to_the_batch_script_lets_them_save(cluster, tmp_path, number):
    job = submit(tmp_path, tasks.save_on_request)
    reports(tmp_path, 2)
    slurm("scancel", "--batch", f"--signal={number}", job.job_id)
    wait_until_ended(job)
    left(tmp_path, f"SIG{number} came")


@pytest.mark.full
@on_slurm
def test_a_time_limit_that_comes_near_lets_them_save(cluster, tmp_path):
    """It is shortened, so that the ranks do not know of it."""
    job = submit(tmp_path, tasks.save_on_request)
    reports(tmp_path, 2)
    slurm("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=1")
    wait_until_ended(job)
    left(tmp_path, "SIGUSR2 came")


@pytest.mark.full
@on_slurm
def test_preemption_that_sends_the_user_signal_lets_them_save(cluster, tmp_path):
    job = submit(tmp_path, tasks.save_on_request)
    reports(tmp_path, 2)
    slurm("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until_ended(job)
    left(tmp_path, "SIGUSR2 came")


@on_slurm
def test_a_component_can_report_another_ones_failure(cluster, tmp_path):
    job = submit(tmp_path, tasks.report_the_other_component)
    wait_until_ended(job)
    (attempt,) = all_attempts(tmp_path)
    assert attempt.failure and attempt.failure["message"] == "rank 1 died without an error message", log(attempt)


@pytest.mark.full
@on_slurm
def test_in_a_batch_job_of_ones_own(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_recipe(tmp_path, cluster={})
    keys = {
        "container_image": pyxis.image(tmp_path / "x.sqsh"),
        "container_mounts": f"[{tmp_path},{ROOT}]",
        "python": sys.executable,
    }
    contained = [f"cluster.{name}.{key}={value}" for name in ("train", "generate") for key, value in keys.items()]
    job, out = sbatch(tmp_path, "-N2 --time=30", "save_on_request", "cluster.requeue.enabled=false", *contained)
    reports(tmp_path / "run", 2)
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_for("is not complete", out, 120)
    left(tmp_path / "run", "SIGUSR2 came")
