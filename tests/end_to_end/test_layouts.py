"""Whole GRPO runs of FSDP2 at every kind of layout, against one rank: the same samples, and the same losses."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, Run, submit
from tests.end_to_end.test_megatron import CONFIGS

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
MIXTURE = {
    "ep2": (2, ["expert_parallel_size=2"]),
    "ep4": (4, ["expert_parallel_size=4"]),
    "tp2-sp-ep2": (4, ["tensor_parallel_size=2", "sequence_parallel=true", "expert_parallel_size=2"]),
    "cp2-ep2": (4, ["context_parallel_size=2", "expert_parallel_size=2"]),
    "hsdp-ep2": (4, ["data_parallel_replicate_size=2", "expert_parallel_size=2"]),
}


def finished(folder, ranks: int, keys, *more: str) -> Run:
    layout = [f"{KEY}.{key}" for key in keys]
    run = submit(folder, *LOCAL, *FIVE_STEPS, f"cluster.train.ranks_per_node={ranks}", *layout, *more, timeout=600)
    assert run.status == 0, run.output
    return run


def samples(run: Run) -> list[list[tuple[list[int], list[int]]]]:
    """Return (prompt, completion) of every sample of every step."""
    steps = sorted((run.folder / "rollouts").glob("step_*.jsonl"))
    assert len(steps) == 5
    return [sorted((line["prompt_tokens"], line["completion_tokens"]) for line in read_rollouts(step)) for step in steps]


def assert_equal(run: Run, one: Run) -> None:
    for line, other in zip(run.metrics(), one.metrics(), strict=True):
        assert abs(line["train/loss"] - other["train/loss"]) < 1e-6, line["step"]
        assert line["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4)
        assert line["train/reward"] == other["train/reward"]
        assert line["train/completion_tokens"] == other["train/completion_tokens"]
    assert samples(run) == samples(one)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return the run on one train rank."""
    return finished(tmp_path_factory.mktemp("one") / "run", 1, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_rank(tmp_path, one, layout):
    assert_equal(finished(tmp_path / "run", *LAYOUTS[layout]), one)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return the overrides of a mixture of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(CONFIGS["mixture"], dtype=torch.float32).save_pretrained(folder)
    model = ("policy.random_init=false", f"policy.model_name={folder}", "policy.tokenizer.name=recipes/tiny")
    return *model, "policy.generation.backend=vllm"


@pytest.fixture(scope="module")
def one_mixture(tmp_path_factory, mixture):
    """Return the mixture's run on one train rank."""
    return finished(tmp_path_factory.mktemp("one_mixture") / "run", 1, [], *mixture)


@pytest.mark.parametrize("layout", MIXTURE)
def test_a_mixture_equals_one_rank(tmp_path, mixture, one_mixture, layout):
    assert_equal(finished(tmp_path / "run", *MIXTURE[layout], *mixture), one_mixture)


RUNS = {
    "recompute": ["activation_checkpointing=true"],
    "selective recompute": ["activation_checkpointing=true", "recompute_granularity=selective"],
}


@pytest.mark.parametrize("keys", RUNS.values(), ids=RUNS)
def test_a_mixture_with_recomputation_equals_one_rank(tmp_path, mixture, one_mixture, keys):
    assert_equal(finished(tmp_path / "run", 2, ["expert_parallel_size=2", *keys], *mixture), one_mixture)


def test_a_colocated_mixture_equals_one_rank(tmp_path, mixture, one_mixture):
    """Train ranks with expert parallelism share their places with an engine of two ranks, whose experts are divided too."""
    engine = ("cluster.generate.ranks_per_node=2", "policy.generation.colocated.enabled=true")
    divided = [f"policy.generation.vllm_cfg.{kind}_parallel_size=2" for kind in ("tensor", "expert")]
    assert_equal(finished(tmp_path / "run", 2, ["expert_parallel_size=2"], *mixture, *engine, *divided), one_mixture)
