"""Tiny models whose attention or head is of more than one kind, or another than full attention and hidden @ W^T."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.train import cases

WINDOW = 4  # shorter than most of `cases.LENGTHS`
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SLIDING, FULL = "sliding_attention", "full_attention"


def _config(model_type: str, **changes) -> PreTrainedConfig:
    own = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    return AutoConfig.for_model(model_type, **{**cases.SHAPE, **own, **changes})


def configs() -> dict[str, PreTrainedConfig]:
    """Return the models by name."""
    gemma = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 10, "layer_types": [SLIDING, FULL]}
    gemma4 = {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL],
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        "final_logit_softcapping": 3.0,
        "rms_norm_eps": 0.03,  # queries and keys are not scaled, so that float32 is less exact with steep norms
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    }
    experts = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
    return {
        "mistral": _config("mistral", sliding_window=WINDOW),
        "qwen2": _config("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        "gemma2": _config("gemma2", **gemma, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, tie_word_embeddings=True),
        "gemma3_text": _config("gemma3_text", **gemma, tie_word_embeddings=True),
        "gemma4_text": _config("gemma4_text", **gemma4, attention_k_eq_v=True),
        "gemma4_moe": _config(
            "gemma4_text",
            **gemma4,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
        "gemma4_per_layer": _config(  # the last two layers share keys and values
            "gemma4_text",
            **{**gemma4, "num_hidden_layers": 4, "layer_types": 2 * [SLIDING, FULL], "hidden_size_per_layer_input": 8},
            vocab_size_per_layer_input=cases.VOCABULARY,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
        ),
        "ministral3": _config(
            "ministral3",
            head_dim=16,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        "gpt_oss": _config(
            "gpt_oss",
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL],
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "glm4": _config(
            "glm4", head_dim=16, rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"}
        ),
        "glm4_moe": _config(
            "glm4_moe",
            **experts,
            head_dim=16,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            use_qk_norm=True,
            rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"},
        ),
        "glm4_moe_lite": _config(
            "glm4_moe_lite",
            **experts,
            **LATENT,
            n_routed_experts=4,
            rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        ),
        "phi": _config("phi", partial_rotary_factor=0.5),  # with biases, of the head too
        "phi3": _config("phi3"),  # joint projections
        "olmo2": _config("olmo2"),  # norms of all heads together
        "cohere": _config("cohere", logit_scale=0.25),
        "cohere2": _config("cohere2", logit_scale=0.25, sliding_window=WINDOW, layer_types=[SLIDING, FULL]),
        "granite": _config(
            "granite", logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2
        ),
        **hybrids(),
    }


def hybrids() -> dict[str, PreTrainedConfig]:
    """Return models with layers that carry a state from token to token."""
    experts = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
    kinds = {"layer_types": ["linear_attention", FULL]}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}
    return {
        "qwen3_5_text": _config("qwen3_5_text", head_dim=16, **kinds, **delta),
        "qwen3_5_moe_text": _config(
            "qwen3_5_moe_text", head_dim=16, **kinds, **delta, **experts, num_experts=4, shared_expert_intermediate_size=24
        ),
        "qwen3_next": _config(
            "qwen3_next", head_dim=16, **kinds, **delta, **experts, num_experts=4, shared_expert_intermediate_size=24
        ),
        "nemotron_h": _config(
            "nemotron_h",
            num_hidden_layers=3,
            layers_block_type=["mamba", "attention", "mlp"],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=4,
        ),
        "lfm2": _config("lfm2", layer_types=["conv", FULL]),
        "bamba": _config("bamba", attn_layer_indices=[1], **mamba),
        "jamba": _config(
            "jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, use_mamba_kernels=False
        ),
        "granitemoehybrid": _config(
            "granitemoehybrid",
            **kinds,
            **mamba,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
            logits_scaling=2.0,
        ),
        "lfm2_moe": _config("lfm2_moe", layer_types=["conv", FULL], **experts, num_experts=4, num_dense_layers=1),
        "olmo_hybrid": _config(
            "olmo_hybrid",
            **kinds,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=4,
            linear_value_head_dim=16,
            linear_allow_neg_eigval=False,
            rms_norm_eps=0.03,  # outputs of a delta net may be near 0, where a norm's gradient would outweigh all others
        ),
        "zamba2": _config(
            "zamba2",
            layers_block_type=["mamba", "hybrid"],
            hybrid_layer_ids=[1],
            num_mem_blocks=1,
            n_mamba_heads=4,
            mamba_d_state=8,
            mamba_ngroups=2,
            chunk_size=4,
            adapter_rank=4,
        ),
        "falcon_mamba": _config("falcon_mamba", state_size=8, mixer_rms_eps=0.03),
        "mamba": _config("mamba", state_size=8),
        "mamba2": _config("mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=4, expand=2),
    }


def write(folder: Path, names: Iterable[str]) -> None:
    """Write a checkpoint of each. Every tensor is random."""
    for name in names:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(configs()[name], dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                adds = name.startswith(("gemma2", "gemma3", "qwen3_"))  # norms that add 1 to their weights
                is_factor = "norm" in parameter_name or "scale" in parameter_name
                parameter.normal_(1.0 if is_factor and not adds else 0.0, 0.2)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name in model.state_dict():  # a router's bias, or a layer's factor
                    buffer.normal_(1.0 if "scalar" in buffer_name else 0.0, 0.2)
        model.save_pretrained(folder / name)
