"""Whole GRPO runs that train adapters: every kind of layout against one rank, Megatron-Core against FSDP2, vLLM's own LoRA."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, Run, submit
from tests.end_to_end.test_megatron import CONFIGS, FIVE_STEPS, KEYS, megatron, of

pytestmark = pytest.mark.full
LORA = "policy.dtensor_cfg.lora_cfg"
OPTIONS = ("dim=4", "alpha=8")
FSDP = ("policy.dtensor_cfg.enabled=true", *(f"{LORA}.{one}" for one in ("enabled=true", *OPTIONS)))
FASTER = ("policy.optimizer.kwargs.lr=0.02",)  # so that adapters change what is sampled
SERVED = ("policy.generation.backend=vllm", "cluster.timeouts.silence=300")
PATIENT = ("cluster.timeouts.silence=300",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function of (model, overrides) -> the run of five steps."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config in CONFIGS.items():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)

    @functools.cache
    def run(model: str, *keys: str) -> Run:
        place = folder / str(len(list(folder.iterdir())))
        done = submit(place, *LOCAL, *FIVE_STEPS, *of(folder / model), *PATIENT, *FASTER, *keys, timeout=580)
        assert done.status == 0, done.output
        return done

    return run


def samples(run: Run) -> list:
    records = [record for path in sorted(run.folder.glob("rollouts/step_*.jsonl")) for record in read_rollouts(path)]
    return [(record["prompt_index"], record["sample"], record["completion_tokens"]) for record in records]


def assert_equal(found: Run, expected: Run) -> None:
    """Assert equal losses, and the same samples in every step; print the largest difference."""
    assert len(found.metrics()) == 5
    pairs = list(zip(found.metrics(), expected.metrics(), strict=True))
    worst = max(abs(line["train/loss"] - other["train/loss"]) for line, other in pairs)
    norm = max(abs(line["train/grad_norm"] / other["train/grad_norm"] - 1) for line, other in pairs)
    same = samples(found) == samples(expected)
    print(f"loss within {worst:.1e}, gradient's norm within {norm:.1e} of it, samples equal: {same}")
    assert worst < 1e-6
    assert norm < 1e-4
    assert same
    assert len({tuple(tokens) for _, _, tokens in samples(found)}) > 40  # of 80


def dtensor(**keys) -> tuple[str, ...]:
    return tuple(f"policy.dtensor_cfg.{key}={value}" for key, value in keys.items())


ONE = ("cluster.train.ranks_per_node=1",)
FOUR = ("cluster.train.ranks_per_node=4",)
LAYOUTS = {
    "tp2": ("dense", dtensor(tensor_parallel_size=2)),
    "cp2": ("dense", dtensor(context_parallel_size=2)),
    "tp2-sp": ("dense", dtensor(tensor_parallel_size=2, sequence_parallel="true")),
    "hsdp": ("dense", (*FOUR, *dtensor(data_parallel_replicate_size=2))),
    "tp2-cp2": ("dense", (*FOUR, *dtensor(tensor_parallel_size=2, context_parallel_size=2))),
    "ep2": ("mixture", dtensor(expert_parallel_size=2)),
}
QUICK = ("tp2",)
# Experts that are bare parameters have no adapters.
ATTENTION = (f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[q_proj,k_proj,v_proj,o_proj]")
# At the rate of the others, Adam enlarges the rounding of a mixture's first steps to 5e-5 of the loss on another backend.
SLOWER = "policy.optimizer.kwargs.lr=0.004"
OF = {"dense": (), "mixture": (SLOWER, *ATTENTION)}


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in LAYOUTS])
def test_a_layout_equals_one_rank(trained, layout):
    model, keys = LAYOUTS[layout]
    assert_equal(trained(model, *FSDP, *OF[model], *keys), trained(model, *FSDP, *OF[model], *ONE))


# An A for each layer that transformers has, as FSDP2's adapters have it.
OWN = ("linear_q", "linear_k", "linear_v", "linear_proj")
TARGETS = {"dense": (*OWN, "linear_fc1_gate", "linear_fc1_up", "linear_fc2"), "mixture": OWN}
MEGATRON = {
    "tp2-sp": ("dense", megatron(tensor_model_parallel_size=2, sequence_parallel="true")),
    "pp2": ("dense", megatron(pipeline_model_parallel_size=2)),
    "cp2": ("dense", megatron(context_parallel_size=2)),
    "ep2": ("mixture", megatron(expert_model_parallel_size=2)),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", MEGATRON)
def test_megatron_equals_fsdp2(trained, layout):
    model, keys = MEGATRON[layout]
    peft = [
        f"policy.megatron_cfg.peft.{one}" for one in ("enabled=true", *OPTIONS, f"target_modules=[{','.join(TARGETS[model])}]")
    ]
    rate = (SLOWER,) if model == "mixture" else ()
    assert_equal(trained(model, *keys, *peft, *rate), trained(model, *FSDP, *OF[model], *ONE))


PEFT = tuple(f"policy.megatron_cfg.peft.{one}" for one in ("enabled=true", *OPTIONS))
ADAPTERS = "policy.generation.lora_refit=adapter"
THREE_STEPS = "grpo.max_num_steps=3"


def test_vllm_serves_adapters_as_merged_weights(trained):
    """Check an engine of two ranks that gets adapters against merged weights."""
    engine = (*SERVED, "policy.generation.vllm_cfg.tensor_parallel_size=2")
    assert_near(trained("dense", *FSDP, *engine, ADAPTERS), trained("dense", *FSDP, *SERVED), steps=5)


SERVING = {  # A is shared between queries, keys and values; experts are not adapted
    "tp2-sp": ("dense", (*MEGATRON["tp2-sp"][1], *PEFT)),
    "ep2": ("mixture", (*MEGATRON["ep2"][1], *PEFT, "policy.megatron_cfg.peft.target_modules=[linear_qkv,linear_proj]")),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", SERVING)
def test_vllm_serves_adapters_of_megatron_as_merged_weights(trained, layout):
    model, keys = SERVING[layout]
    merged = trained(model, *keys, *SERVED, THREE_STEPS)
    adapters = trained(model, *keys, *SERVED, THREE_STEPS, ADAPTERS)
    assert_near(adapters, merged, steps=3)
    assert samples(adapters) == samples(merged)


def assert_near(adapters: Run, merged: Run, steps: int) -> None:
    """Assert that a run whose engines apply adapters has the metrics of one with merged weights."""
    assert len(adapters.metrics()) == steps
    for line, other in zip(adapters.metrics(), merged.metrics(), strict=True):
        for key in KEYS:
            assert line[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (line["step"], key)
        assert abs(line["train/token_mult_prob_error"] - 1) < 1e-5
