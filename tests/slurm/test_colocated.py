"""One allocation, two overlapping steps: both see the same GPUs, in a job of ours and inside an salloc."""

import pytest

from launch.executors.executor import ROOT
from launch.executors.nodes import ColocatedComponent
from launch.executors.slurm import HetSlurmExecutor
from pipeline.config import ClusterConfig, ComponentConfig
from tests.launch import tasks
from tests.launch.model import write_recipe
from tests.launch.waiting import reports, wait_until_ended
from tests.slurm.test_allocation import salloc

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def cluster(slurm_cluster, monkeypatch):
    slurm_cluster.enter(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HETSTEP_SETTLE_S", "1")


def check(found: list[dict]) -> None:
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train"] * 4 + ["generate"] * 2
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1"] * 6
    nodes = [each["HETSTEP_NODE"] for each in found]
    assert nodes[:2] == [nodes[0]] * 2 and nodes[2:4] == [nodes[2]] * 2 and nodes[4:] == [nodes[0], nodes[2]]
    assert nodes[0] != nodes[2] and {each["HETSTEP_MASTER_ADDR"] for each in found} == {nodes[0]}


def test_a_job(tmp_path):
    sizes = {"nodes": 2, "gpus_per_node": 2, "cpus_per_task": 1}
    components = {"train": ComponentConfig(**sizes), "generate": ColocatedComponent(**sizes, ranks_per_node=1)}
    job = HetSlurmExecutor(tmp_path, "shared", ClusterConfig(time_min=5), components).submit(
        tasks.report_and_finish, str(tmp_path)
    )
    wait_until_ended(job)
    assert job.status(now=True).succeeded
    check(reports(tmp_path, 6))


@pytest.mark.long
def test_inside_an_salloc(tmp_path, monkeypatch):
    write_recipe(tmp_path, cluster={})
    monkeypatch.chdir(tmp_path)
    answer = salloc(
        *("-N2 --ntasks-per-node=2 --gpus-per-node=2", "report_and_finish", "grpo.max_num_steps=1"),
        *("policy.generation.colocated.enabled=true", "cluster.train.nodes=2", "cluster.train.gpus_per_node=2"),
        "cluster.generate.ranks_per_node=1",
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    check(reports(tmp_path / "run", 6))
