"""A tiny config and checkpoint of every model family that Megatron-Core trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = {
    "vocab_size": 61,  # odd, so that it must be padded for two ranks
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 4.0, "beta_slow": 1.0},
}
HYBRID = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    "chunk_size": 4,
    "time_step_min": 0.3,  # some steps are at the bound
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
}
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 6,
    "rms_norm_eps": 0.03,  # outputs of a delta net may be near 0, where a norm's gradient would outweigh all others
    "layer_types": ["linear_attention", "full_attention"],
}


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
        "llama_yarn": LlamaConfig(**SHAPE, rope_parameters=YARN_ROPE),
        "qwen2": Qwen2Config(**SHAPE),
        "qwen3": Qwen3Config(**SHAPE, head_dim=16),
        "qwen3_tied": Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}, head_dim=16),
        "qwen3_moe": Qwen3MoeConfig(
            **{**SHAPE, "num_hidden_layers": 3},
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
        "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
        "deepseek_v3": DeepseekV3Config(**{**SHAPE, **LATENT}),
        # Queries without a latent, no groups, plain RoPE, norms of the latents with another epsilon than the others.
        "deepseek_v3_plain": DeepseekV3Config(
            **{
                **SHAPE,
                **LATENT,
                "q_lora_rank": None,
                "n_group": 1,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            }
        ),
        "nemotron_h": NemotronHConfig(**SHAPE, **HYBRID, hybrid_override_pattern="M-*M"),
        "nemotron_h_moe": NemotronHConfig(**SHAPE, **HYBRID, hybrid_override_pattern="ME*EM", moe_latent_size=24),
        "mistral": MistralConfig(**SHAPE, head_dim=12, sliding_window=5),
        "ministral3": Ministral3Config(
            **SHAPE,
            head_dim=16,
            rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0},
        ),
        "gemma3_text": Gemma3TextConfig(
            **{**SHAPE, "num_hidden_layers": 4, "tie_word_embeddings": True},
            head_dim=16,
            query_pre_attn_scalar=24,
            pad_token_id=None,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        ),
        "gemma4_text": Gemma4TextConfig(
            **{**SHAPE, "num_hidden_layers": 4, "tie_word_embeddings": True, "num_key_value_heads": 4},
            head_dim=8,
            global_head_dim=16,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            pad_token_id=None,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
            final_logit_softcapping=3.0,
            rms_norm_eps=0.03,  # queries and keys are not scaled, so that float32 is less exact with steep norms
        ),
        "gpt_oss": GptOssConfig(
            **SHAPE,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=5,
            swiglu_limit=0.7,
            rope_parameters={**YARN_ROPE, "truncate": False},
        ),
        "glm4": Glm4Config(**SHAPE, head_dim=16, pad_token_id=None),
        "glm4_moe": Glm4MoeConfig(
            **{**SHAPE, "num_hidden_layers": 3},
            head_dim=16,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            routed_scaling_factor=1.5,
        ),
        "glm4_moe_lite": Glm4MoeLiteConfig(
            **{
                **SHAPE,
                **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"},
                "n_group": 1,
                "n_shared_experts": 1,
                "routed_scaling_factor": 1.8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            }
        ),
        "glm_moe_dsa": GlmMoeDsaConfig(
            **{
                **SHAPE,
                **LATENT,
                "n_group": 1,
                "num_experts_per_tok": 3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            index_n_heads=2,
            index_head_dim=8,
            index_topk=64,
        ),
        "minimax_m2": MiniMaxM2Config(
            **SHAPE,
            head_dim=16,
            rotary_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            scoring_func="sigmoid",  # this and the next for vLLM
            use_routing_bias=True,
        ),
        "qwen3_5_text": Qwen3_5TextConfig(**SHAPE, **DELTA_NET),
        "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
            **SHAPE,
            **DELTA_NET,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
        ),
    }


FAMILIES = tuple(configs())


def write_models(folder: Path, families: Sequence[str] = FAMILIES) -> None:
    """Write one checkpoint per family.

    Every tensor is random, also biases and norms, which would otherwise start at 0 and 1.
    """
    for family in families:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(configs()[family], dtype=torch.float32)
        tensors = dict(model.named_parameters())
        tensors |= {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}  # a router's bias
        with torch.no_grad():
            for name, tensor in tensors.items():
                factor = ("norm" in name and not _adds_one(family, name)) or name.endswith("layer_scalar")
                tensor.normal_(1.0 if factor else 0.0, 0.2)
        model.save_pretrained(folder / family)


def _adds_one(family: str, norm: str) -> bool:
    """Return whether a norm multiplies by 1 plus its weight."""
    return family.startswith("gemma3") or (family.startswith("qwen3_5") and "linear_attn" not in norm)
