"""Whole GRPO runs that train adapters: cut by tensor parallelism, and served by vLLM's own LoRA, against one rank."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, submit
from tests.end_to_end.test_megatron import CONFIGS, FIVE_STEPS, KEYS, of

pytestmark = pytest.mark.full
LORA = "policy.dtensor_cfg.lora_cfg"
ADAPTED = ("policy.dtensor_cfg.enabled=true", f"{LORA}.enabled=true", f"{LORA}.dim=4", f"{LORA}.alpha=8")
FASTER = ("policy.optimizer.kwargs.lr=0.02",)  # so that adapters change what is sampled
VLLM = ("policy.generation.backend=vllm", "cluster.timeouts.silence=200")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function of overrides -> the run of five steps."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(CONFIGS["dense"], dtype=torch.float32).save_pretrained(folder / "dense")

    @functools.cache
    def run(*keys: str):
        place = folder / str(len(list(folder.iterdir())))
        done = submit(place, *LOCAL, *FIVE_STEPS, *of(folder / "dense"), *ADAPTED, *FASTER, *keys, timeout=500)
        assert done.status == 0, done.output
        return done

    return run


def samples(run) -> list:
    records = [record for path in sorted(run.folder.glob("rollouts/step_*.jsonl")) for record in read_rollouts(path)]
    return [(record["prompt_index"], record["sample"], record["completion_tokens"]) for record in records]


ONE = ("cluster.train.ranks_per_node=1",)


@pytest.mark.parametrize(
    "keys",
    [
        ("policy.dtensor_cfg.tensor_parallel_size=2",),
        pytest.param(("policy.dtensor_cfg.context_parallel_size=2",), marks=pytest.mark.long),
        pytest.param(("policy.dtensor_cfg.data_parallel_replicate_size=2",), marks=pytest.mark.long),
    ],
    ids=["tp2", "cp2", "hsdp2"],
)
def test_a_layout_equals_one_rank(trained, keys):
    expected, found = trained(*ONE), trained(*keys)
    for line, other in zip(found.metrics(), expected.metrics(), strict=True):
        assert abs(line["train/loss"] - other["train/loss"]) < 1e-6
        assert abs(line["train/grad_norm"] / other["train/grad_norm"] - 1) < 1e-4
    assert samples(found) == samples(expected)
    assert len(samples(found)) > 0


def test_vllm_serves_adapters_as_merged_weights(trained):
    """Check an engine of two ranks that gets adapters against merged weights."""
    engine = (*VLLM, "policy.generation.vllm_cfg.tensor_parallel_size=2")
    merged = trained(*VLLM)
    adapters = trained(*engine, "policy.generation.lora_refit=adapter")
    for line, other in zip(adapters.metrics(), merged.metrics(), strict=True):
        for key in KEYS:
            assert line[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (line["step"], key)
        assert abs(line["train/token_mult_prob_error"] - 1) < 1e-5
