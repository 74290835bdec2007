"""A recipe of every model family plans at the family's published size, and fits its GPUs, on each backend that trains it."""

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.full
KEY = "policy.megatron_cfg"
ON_MEGATRON = ("policy.dtensor_cfg.enabled=false", f"{KEY}.enabled=true", f"{KEY}.tensor_model_parallel_size=4")
EXPERTS_OVER_8 = "policy.dtensor_cfg.expert_parallel_size=8"
CASES = [  # (recipe, model, further keys)
    ("llama8b_grpo", "mistralai/Mistral-Nemo-Instruct-2407", ()),
    ("llama8b_grpo", "mistralai/Mistral-Nemo-Instruct-2407", ON_MEGATRON),
    ("llama8b_grpo", "google/gemma-3-1b-it", ()),
    ("llama8b_grpo", "google/gemma-3-1b-it", ON_MEGATRON[:2]),
    ("qwen3_32b_grpo", "google/gemma-3-27b-it", ()),
    ("qwen3_32b_grpo", "google/gemma-4-31B-it", ()),
    ("llama8b_grpo", "google/gemma-4-26B-A4B-it", (EXPERTS_OVER_8,)),
    ("llama8b_grpo", "google/gemma-4-E2B-it", ()),
    ("llama8b_grpo", "unsloth/gpt-oss-20b-BF16", ()),
    ("llama8b_grpo", "unsloth/gpt-oss-20b-BF16", (EXPERTS_OVER_8,)),
    ("qwen3_30ba3b_grpo", "unsloth/gpt-oss-20b-BF16", ()),
    ("llama8b_grpo", "zai-org/GLM-4-9B-0414", ()),
    (
        "llama8b_grpo",
        "zai-org/GLM-4-9B-0414",
        (*ON_MEGATRON[:2], f"{KEY}.tensor_model_parallel_size=2", f"{KEY}.activation_checkpointing=true"),
    ),
    ("qwen3_235b_grpo", "zai-org/GLM-4.5-Air", ()),
    ("llama8b_grpo", "Qwen/Qwen3.5-9B", ()),
    ("llama8b_grpo", "Qwen/Qwen3.5-35B-A3B", (EXPERTS_OVER_8, "cluster.train.nodes=4")),
    ("llama8b_grpo", "nvidia/NVIDIA-Nemotron-Nano-9B-v2", ()),
    ("llama8b_grpo", "nvidia/NVIDIA-Nemotron-Nano-9B-v2", ON_MEGATRON),
    ("qwen3_30ba3b_grpo", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", ()),
    ("llama8b_grpo", "moonshotai/Moonlight-16B-A3B-Instruct", (EXPERTS_OVER_8,)),
    ("qwen3_30ba3b_grpo", "moonshotai/Moonlight-16B-A3B-Instruct", ()),
    (
        "deepseek_v3_grpo",
        "unsloth/Kimi-K2-Instruct-BF16",
        (
            *(f"{KEY}.expert_model_parallel_size=32", "cluster.train.nodes=64"),
            *("policy.generation.vllm_cfg.tensor_parallel_size=64", "policy.generation.vllm_cfg.expert_parallel_size=64"),
        ),
    ),
]


@pytest.mark.parametrize(
    ("recipe", "model", "keys"),
    CASES,
    ids=[f"{model}-{'megatron' if KEY in str(keys) else recipe}" for recipe, model, keys in CASES],
)
def test_fits(recipe: str, model: str, keys: tuple[str, ...], printed: Callable[..., str]):
    assert "verdict       fits" in printed(f"recipe={recipe}", f"policy.model_name={model}", *keys)
