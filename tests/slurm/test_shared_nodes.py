"""One allocation, a step for each component, each with GPUs of its own on every node, in a job of ours and inside an salloc."""

import os
import tempfile
from pathlib import Path

import pytest

from launch.executors.executor import ROOT
from launch.executors.nodes import ColocatedComponent
from launch.executors.slurm import HetSlurmExecutor
from pipeline.config import ClusterConfig, ComponentConfig
from tests.launch import tasks
from tests.launch.model import write_recipe
from tests.launch.waiting import reports, wait_until_ended
from tests.slurm.cluster import SlurmCluster
from tests.slurm.test_allocation import salloc

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def cluster(slurm_cluster, monkeypatch):
    slurm_cluster.enter(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HETSTEP_SETTLE_S", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_a_job_divides_the_gpus_of_each_node(tmp_path):
    """The components use 7 of 8 GPUs; the job has all of them, as it takes whole nodes."""
    components = {
        name: kind(nodes=2, gpus_per_node=count, ranks_per_node=1)
        for name, kind, count in (
            ("train", ComponentConfig, 4),
            ("generate", ColocatedComponent, 2),
            ("reward", ColocatedComponent, 1),
        )
    }
    for name in ("generate", "reward"):
        components[name].shares_gpus = False
    job = HetSlurmExecutor(tmp_path, "shared", ClusterConfig(time_min=5), components).submit(
        tasks.report_and_finish, str(tmp_path)
    )
    wait_until_ended(job)
    assert job.status(now=True).succeeded, (tmp_path / f"submitit/{job.job_id}_0_log.out").read_text()
    found = reports(tmp_path, 6)
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train"] * 2 + ["generate"] * 2 + ["reward"] * 2
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1,2,3"] * 2 + ["4,5"] * 2 + ["6"] * 2
    nodes = [each["HETSTEP_NODE"] for each in found]
    assert nodes == nodes[:2] * 3 and nodes[0] != nodes[1] and {each["HETSTEP_MASTER_ADDR"] for each in found} == {nodes[0]}
    assert {each["OMP_NUM_THREADS"] for each in found} == {"2"}  # 8 CPUs for 3 ranks


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_ranks_with_gpus_are_bound_to_no_cpu(tmp_path, monkeypatch):
    """A Slurm that binds tasks would bind each rank to one CPU."""
    node = "CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 Gres=gpu:2"
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        own = SlurmCluster(Path(folder), [node], settings="TaskPlugin=task/affinity\nSelectTypeParameters=CR_Core")
        own.start()
        try:
            monkeypatch.setenv("SLURM_CONF", own.env["SLURM_CONF"])
            components = {"train": ComponentConfig(gpus_per_node=2)}
            job = HetSlurmExecutor(tmp_path, "own", ClusterConfig(time_min=5), components).submit(
                tasks.report_and_finish, str(tmp_path)
            )
            wait_until_ended(job)
        finally:
            own.stop()
    found = reports(tmp_path, 2)
    assert [(each["cpus"], each["OMP_NUM_THREADS"]) for each in found] == [(2, "1")] * 2


@pytest.mark.full
def test_inside_an_salloc(tmp_path, monkeypatch):
    write_recipe(tmp_path, cluster={})
    monkeypatch.chdir(tmp_path)
    keys = ("cluster.share_nodes=true", "cluster.train.gpus_per_node=4", "cluster.train.ranks_per_node=2")
    keys += ("cluster.generate.gpus_per_node=2", "cluster.generate.ranks_per_node=1", "grpo.max_num_steps=1")
    small = salloc("-N1 --gpus-per-node=4 --ntasks-per-node=4", "report_and_finish", *keys)
    assert small.returncode == 2
    assert "- cluster.train.gpus_per_node: got 6 GPUs on each node" in small.stderr and "[over-limit]" in small.stderr
    apart = salloc("-N1 --gpus-per-node=8 --ntasks-per-node=4", "report_and_finish", *keys, "cluster.share_nodes=false")
    assert apart.returncode == 2
    assert "- cluster.generate.nodes: got 1;" in apart.stderr and "cluster.share_nodes=true" in apart.stderr
    answer = salloc("-N1 --gpus-per-node=8 --ntasks-per-node=4", "report_and_finish", *keys)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = reports(tmp_path / "run", 3)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1,2,3"] * 2 + ["4,5"]
    assert len({each["HETSTEP_NODE"] for each in found}) == 1
