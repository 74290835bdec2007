"""The recipe: single values that are refused, and values that contradict each other."""

import pytest

from pipeline import config
from tests.problems import named, refused

MINIMAL = "algorithm: grpo\npolicy: {model_name: x}\nenv: {e: {kind: math}}\ndata: {train: {env_name: e}}\n"


@pytest.fixture
def write(tmp_path):
    def to(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return to


def test_a_written_recipe_reads_back_equal(write, tmp_path):
    recipe = config.load(write("a.yaml", MINIMAL), ["policy.optimizer.kwargs.eps=1e-8", "policy.max_total_sequence_length=64"])
    config.write(recipe, tmp_path / "resolved.yaml")
    again = config.read(tmp_path / "resolved.yaml")
    assert again == recipe
    assert again.policy.optimizer.kwargs["eps"] == 1e-8
    assert again.data.max_input_seq_length == again.policy.generation.vllm_cfg.max_model_len == 64


DTENSOR, GENERATION = "policy.dtensor_cfg", "policy.generation"


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        (["seed"], "seed", "bad-format"),
        ([f"{GENERATION}.vllm_cfg.max_model_len=1"], f"{GENERATION}.vllm_cfg.max_model_len", "too-small"),
        (["cluster.requeue.max_restarts=-1"], "cluster.requeue.max_restarts", "too-small"),
        (["checkpointing.checkpoint_must_save_by=03:45:00"], "checkpointing.checkpoint_must_save_by", "bad-format"),
        (["checkpointing.checkpoint_must_save_by=1:03:45:00"], "checkpointing.checkpoint_must_save_by", "bad-format"),
        (["checkpointing.checkpoint_must_save_by='0:0:0:0'"], "checkpointing.checkpoint_must_save_by", "bad-format"),
    ],
)
def test_an_invalid_value_is_refused_whatever_the_others_are(write, overrides, key, code):
    with refused((key, code)):
        config.load(write("a.yaml", MINIMAL), overrides)


CONTRADICTIONS = [
    (
        [f"{DTENSOR}.compile=true", f"{DTENSOR}.tensor_parallel_size=2", "cluster.train.ranks_per_node=2"],
        (f"{DTENSOR}.compile", "contradiction"),
    ),
    (
        [f"{DTENSOR}.use_liger_kernel=true", f"{DTENSOR}.compile=true", "cluster.train.gpus_per_node=1"],
        (f"{DTENSOR}.use_liger_kernel", "contradiction"),
    ),
    ([f"{DTENSOR}.use_liger_kernel=true"], (f"{DTENSOR}.use_liger_kernel", "needs-gpu")),
    (
        [f"{DTENSOR}.flash_attention=3", "cluster.train.gpus_per_node=8", "cluster.train.gpu=b200"],
        (f"{DTENSOR}.flash_attention", "unsupported"),
    ),
    ([f"{DTENSOR}.recompute_granularity=selective"], (f"{DTENSOR}.recompute_granularity", "has-no-effect")),
    *(
        (
            [f"{DTENSOR}.reference_cpu_offload=false", f"{DTENSOR}.{key}=true"],
            (f"{DTENSOR}.reference_cpu_offload", "has-no-effect"),
        )
        for key in ("lora_cfg.enabled", "cpu_offload")
    ),
    (
        [f"{DTENSOR}.{key}" for key in ("activation_checkpointing=true", "recompute_granularity=selective", "compile=true")],
        (f"{DTENSOR}.recompute_granularity", "contradiction"),
    ),
    ([f"{GENERATION}.vllm_cfg.max_model_len=513"], (f"{GENERATION}.vllm_cfg.max_model_len", "contradiction")),
    ([f"{GENERATION}.vllm_cfg.max_model_len=511"], (f"{GENERATION}.vllm_cfg.max_model_len", "contradiction")),
    (["data.max_input_seq_length=513"], ("data.max_input_seq_length", "too-large")),
    (["algorithm=sft", "data.max_input_seq_length=513"], ("data.max_input_seq_length", "too-large")),
    (["plan.prompt_tokens=513"], ("plan.prompt_tokens", "too-large")),
    (["plan.prompt_tokens=65", "data.max_input_seq_length=64"], ("plan.prompt_tokens", "too-large")),
    (["plan.answer_tokens=513"], ("plan.answer_tokens", "too-large")),
    (["plan.answer_tokens=33", f"{GENERATION}.max_new_tokens=32"], ("plan.answer_tokens", "too-large")),
    (["plan.answer_tokens=500", "plan.prompt_tokens=13"], ("plan.answer_tokens", "too-large")),
    (["algorithm=sft", "plan.answer_tokens=65", "data.max_input_seq_length=64"], ("plan.answer_tokens", "too-large")),
    (["algorithm=sft", f"{GENERATION}.temperature=0.6"], (f"{GENERATION}.temperature", "contradiction")),
    (["policy.sequence_packing.train_mb_tokens=100"], ("policy.sequence_packing.train_mb_tokens", "too-small")),
    (["grpo.val_period=5"], ("grpo.val_period", "missing-value")),
    (
        ["cluster.train.ranks_per_node=1024", f"{DTENSOR}.enabled=true"],
        ("policy.train_global_batch_size", "too-small"),
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), CONTRADICTIONS)
def test_values_that_contradict_each_other(write, overrides, expected):
    assert named(config.inspect(write("a.yaml", MINIMAL), overrides).problems) == {expected}
