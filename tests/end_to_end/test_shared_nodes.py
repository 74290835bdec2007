"""Runs whose components have GPUs of their own on the same nodes: the same numbers, to the bit, as on nodes of their own."""

import hashlib
from pathlib import Path

import pytest

from tests.end_to_end.runs import Fault, submit

GPUS = (  # which are links to /dev/null: the ranks compute on CPUs
    *("cluster.executor=slurm", "cluster.node_checks.enabled=false"),
    *("cluster.train.gpus_per_node=4", "cluster.train.ranks_per_node=2"),
    *("cluster.generate.gpus_per_node=4", "cluster.generate.ranks_per_node=2"),
)
ONE_NODE = (*GPUS, "cluster.share_nodes=true")


def digests(folder: Path) -> dict[str, str]:
    """Return digests of the weights and the optimizer's state in all checkpoints."""
    files = sorted(folder.glob("checkpoints/*/*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slurm
@pytest.mark.full
def test_one_node_equals_nodes_of_their_own(tmp_path, uninterrupted, slurm_cluster):
    run = submit(tmp_path / "run", *ONE_NODE, "grpo.max_num_steps=2", env=slurm_cluster.env)
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted[:2]
    batch = (run.folder / "batch.sh").read_text()
    assert "hetjob" not in batch and batch.count("srun --overlap") == 2


@pytest.mark.slurm
@pytest.mark.full
def test_one_node_has_the_checkpoints_of_two(tmp_path, slurm_cluster):
    one, two = (submit(tmp_path / name, *keys, env=slurm_cluster.env) for name, keys in (("one", ONE_NODE), ("two", GPUS)))
    assert one.status == two.status == 0, one.output + two.output
    assert "hetjob" in (two.folder / "batch.sh").read_text()
    assert len(one.metrics()) == 4 and one.metrics() == two.metrics()
    assert digests(one.folder) == digests(two.folder)
    assert len(digests(one.folder)) == 4 * 2  # of each step and train rank


@pytest.mark.slurm
@pytest.mark.long
def test_a_crash_starts_all_steps_again(tmp_path, uninterrupted, slurm_cluster):
    fault = Fault("decode", victim=3, actor=2, count=3)
    run = submit(tmp_path / "run", *ONE_NODE, "cluster.requeue.max_restarts=1", env=slurm_cluster.env, fault=fault)
    assert run.status == 0, run.output
    assert [verdict.partition(":")[0] for verdict in run.verdicts()] == ["requeue", "done"]
    assert run.metrics() == uninterrupted
