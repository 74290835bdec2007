"""Whole GRPO runs of FSDP2 at every kind of layout, against one rank: the same samples, and the same losses."""

import pytest

from pipeline.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, Run, submit

pytestmark = pytest.mark.long
KEY = "policy.dtensor_cfg"
FIVE_STEPS = (
    *("grpo.max_num_steps=5", "checkpointing.enabled=false", "cluster.generate.ranks_per_node=1"),
    "cluster.timeouts.silence=200",
)
LAYOUTS = {  # name: (train ranks, keys)
    "cp2": (2, ["context_parallel_size=2"]),
    "tp2-sp": (2, ["tensor_parallel_size=2", "sequence_parallel=true"]),
    "hsdp": (4, ["data_parallel_replicate_size=2"]),
    "tp2-cp2": (4, ["tensor_parallel_size=2", "context_parallel_size=2"]),
    "tp2-sp-cp2": (4, ["tensor_parallel_size=2", "sequence_parallel=true", "context_parallel_size=2"]),
}


def finished(folder, ranks: int, keys) -> Run:
    layout = [f"{KEY}.{key}" for key in keys]
    run = submit(folder, *LOCAL, *FIVE_STEPS, f"cluster.train.ranks_per_node={ranks}", *layout, timeout=600)
    assert run.status == 0, run.output
    return run


def samples(run: Run) -> list[list[tuple[list[int], list[int]]]]:
    """Return (prompt, completion) of every sample of every step."""
    steps = sorted((run.folder / "rollouts").glob("step_*.jsonl"))
    assert len(steps) == 5
    return [sorted((line["prompt_tokens"], line["completion_tokens"]) for line in read_rollouts(step)) for step in steps]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return the run on one train rank."""
    return finished(tmp_path_factory.mktemp("one") / "run", 1, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_rank(tmp_path, one, layout):
    run = finished(tmp_path / "run", *LAYOUTS[layout])
    for line, other in zip(run.metrics(), one.metrics(), strict=True):
        assert abs(line["train/loss"] - other["train/loss"]) < 1e-6, line["step"]
        assert line["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
        assert line["train/reward"] == other["train/reward"]
        assert line["train/completion_tokens"] == other["train/completion_tokens"]
    assert samples(run) == samples(one)
