"""Runs whose train and generate ranks share GPUs: the same numbers as with ranks apart, on both executors.

On a CPU what goes to the host is copied and comes back all the same; only vLLM's engine cannot sleep there. Refits go through
memory that both ranks map, as they do on GPUs.
"""

import re
import signal

import pytest

from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, Fault, left_alive, submit

SHARED = ("policy.generation.colocated.enabled=true",)
ONE_ALLOCATION = ("cluster.executor=slurm", "cluster.train.nodes=2", "cluster.train.ranks_per_node=1")


def test_a_colocated_run_equals_one_with_separate_gpus(tmp_path, uninterrupted):
    """A checkpoint follows each step, from which the engines resume with their weights."""
    run = submit(tmp_path / "run", *LOCAL, *SHARED)
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted
    assert all(line["time/sharing"] > 0 for line in read(run.folder / "metrics.jsonl"))


@pytest.mark.full  # by default: tests/refit/test_shared_memory.py
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_fails_in_a_refit_is_named(what, tmp_path):
    fault = Fault("round 2", victim=3, actor=3, count=3, signal=what)
    run = submit(tmp_path / "run", *LOCAL, *SHARED, "cluster.timeouts.silence=6", fault=fault)
    assert run.status == 1
    if what == signal.SIGKILL:
        assert "rank 3 (generate) was ended by" in run.output
    else:
        failure = run.failure()
        assert (failure["rank"], failure["realm"], failure["verb"]) == (3, "generate", "receive")
        assert re.fullmatch(r"round 2 of \d+, (to rank 2, )?from ranks? [0-2, ]+", failure["phase"])
        assert "rank 3 (generate)" in run.output and "verb 'receive', phase 'round 2" in run.output
    assert left_alive(run.folder) == []


@pytest.mark.slurm
@pytest.mark.long
def test_one_allocation_equals_separate_gpus(tmp_path, uninterrupted, slurm_cluster):
    run = submit(tmp_path / "run", *SHARED, *ONE_ALLOCATION, "cluster.generate.ranks_per_node=1", env=slurm_cluster.env)
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted
    batch = (run.folder / "batch.sh").read_text()
    assert "hetjob" not in batch and batch.count("srun --overlap") == 2


@pytest.mark.slurm
@pytest.mark.long
def test_a_crash_in_one_allocation_starts_both_steps_again(tmp_path, uninterrupted, slurm_cluster):
    fault = Fault("decode", victim=3, actor=2, count=3)
    again = ("cluster.requeue.max_restarts=1", *ONE_ALLOCATION, "cluster.generate.ranks_per_node=1")
    run = submit(tmp_path / "run", *SHARED, *again, env=slurm_cluster.env, fault=fault)
    assert run.status == 0, run.output
    assert [verdict.partition(":")[0] for verdict in run.verdicts()] == ["requeue", "done"]
    assert run.metrics() == uninterrupted


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        ("policy.generation.refit_transport=delta",),
        ("policy.generation.colocated.refit=host",),
        ("policy.megatron_cfg.enabled=true",),
        ("policy.generation.backend=vllm", "cluster.timeouts.silence=120"),
        ("policy.generation.refit_transport=broadcast", "grpo.val_period=1", "grpo.max_val_samples=4"),
    ],
    ids=["delta", "host", "megatron", "vllm", "broadcast"],
)
def test_other_backends_and_transports(keys, tmp_path):
    short = (*LOCAL, *keys, "grpo.max_num_steps=2")
    apart, shared = (submit(tmp_path / name, *short, *more) for name, more in (("apart", ()), ("shared", SHARED)))
    assert apart.status == shared.status == 0, apart.output + shared.output
    assert len(shared.metrics()) == 2
    assert shared.metrics() == apart.metrics()
