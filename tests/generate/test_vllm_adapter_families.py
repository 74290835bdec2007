"""vLLM's LoRA of every family whose adapters Megatron-Core trains, against merged weights: greedy tokens and log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline.config import MegatronConfig, MegatronLoRAConfig
from pipeline.generate import build
from pipeline.train.adapters.modules import options
from pipeline.train.adapters.served_adapters import served_adapters
from pipeline.train.adapters.spec import AdapterSpec
from tests.generate.families import LATENT, MIXTURE
from tests.generate.test_vllm_adapters import drawn_adapters, merged
from tests.generate.tiny import SHAPE, VOCAB, destroy_groups, drain, load, policy, requests
from tests.problems import refused

ATTENTION = ["linear_qkv", "linear_proj"]
SHARED = ["*.shared_experts.*"]
LATENT_TARGETS = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj"]
WIDE = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # sizes that vLLM's kernel has
FAMILIES = {  # {name: (configuration class, its fields besides SHAPE, target_modules)}
    "qwen2": ("Qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}, []),  # vLLM ignores head_dim
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}, []),
    "gemma3_text": ("Gemma3Text", {"tie_word_embeddings": True}, []),
    "glm4": ("Glm4", {}, [*ATTENTION, "linear_fc2"]),
    "qwen3_moe": ("Qwen3Moe", {**MIXTURE, "num_experts": 4}, ATTENTION),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION),
    "nemotron_h": (
        "NemotronH",
        {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "hybrid_override_pattern": "M*-"},
        [*ATTENTION, "in_proj", "out_proj"],
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**MIXTURE, "n_routed_experts": 4, "first_k_dense_replace": 1},
        [*ATTENTION, *SHARED, "*.0.mlp.*"],
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**MIXTURE, **LATENT, **WIDE, "topk_method": "noaux_tc"},
        [*LATENT_TARGETS, *SHARED, "*.0.mlp.*"],
    ),
}
pytestmark = pytest.mark.long


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_equal_merged_weights(family, tmp_path):
    kind, fields, targets = FAMILIES[family]
    weights = save(tmp_path, getattr(transformers, f"{kind}Config")(**SHAPE | fields))
    section = policy(tmp_path, "vllm")
    section.generation.vllm_cfg.enable_prefix_caching = family != "nemotron_h"  # it needs chunked prefill with states
    peft = MegatronLoRAConfig(True, dim=4, alpha=6, target_modules=targets)
    section.megatron_cfg = MegatronConfig(enabled=True, peft=peft)
    served = served_adapters(section)
    tensors = drawn_adapters(served.shapes, 0)
    found, base = drained(section, tensors, served), drained(section, weights)
    expected = drained(section, merged(weights, tensors, AdapterSpec.of(options(peft))))
    assert {id: done.tokens.tolist() for id, done in found.items()} == {id: d.tokens.tolist() for id, d in expected.items()}
    assert all(np.abs(done.logprobs - expected[id].logprobs).max() < 1e-4 for id, done in found.items())
    assert any(done.tokens.tolist() != base[id].tokens.tolist() for id, done in found.items())


def test_adapters_of_a_layer_that_vllm_takes_for_two_are_refused(tmp_path):
    save(tmp_path, transformers.Glm4Config(**SHAPE))
    section = policy(tmp_path, "vllm")
    section.megatron_cfg = MegatronConfig(enabled=True, peft=MegatronLoRAConfig(True, target_modules=["linear_fc1"]))
    with refused(("policy.generation.lora_refit", "unsupported")):
        build(section, 1, 0, 0, served_adapters(section))
    destroy_groups()


def save(folder: Path, config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Write a random model with a tokenizer; return its weights on disk."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def drained(section, tensors, served=None):
    """Return an engine's greedy completions with these weights, or adapters."""
    engine = build(section, 1, 0, 0, served)
    load(engine, tensors.items(), 0)
    found = drain(engine, requests(8, 1, temperature=0.0))
    engine.close()  # pyright: ignore[reportAttributeAccessIssue] - a vLLM engine
    destroy_groups()  # those of a dense model lack one that mixtures of experts need
    return found
