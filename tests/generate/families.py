"""A tiny config of every text model family that vLLM builds here, and rank r of n of vLLM's model of it, in one process.

The ranks are torch's "fake" process group: it has any size, and its collectives do nothing; building a model and loading its
weights need none.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SHAPE = {
    "vocab_size": 100,  # not a multiple of vLLM's padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,  # these two: with AMX, vLLM needs multiples of 32
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
# {name: (configuration class, its fields besides SHAPE)}
SHORT = {
    "llama": ("Llama", {}),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3_tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32, "num_experts": 4, **MIXTURE}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", {**MIXTURE, **LATENT, "topk_method": "noaux_tc"}),
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
LONG = {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon_multi_query": ("Falcon", {"multi_query": True, "alibi": False, "new_decoder_architecture": False}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"tie_word_embeddings": True, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {"tie_word_embeddings": True}),
    "deepseek_v2": ("DeepseekV2", {**MIXTURE, **LATENT}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "exaone4": ("Exaone4", {}),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma4": ("Gemma4Text", {**GEMMA4, "attention_k_eq_v": True}),
    "gemma4_moe": (
        "Gemma4Text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4_per_layer": (
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 100,
        },
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4_moe": ("Glm4Moe", {**MIXTURE, "n_routed_experts": 4, "head_dim": 16, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("Glm4MoeLite", {**MIXTURE, **LATENT, "n_group": 1, "topk_method": "noaux_tc"}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True}),
    "gpt_bigcode": ("GPTBigCode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True}),
    "gpt_j": ("GPTJ", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_oss": ("GptOss", {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "granite": ("Granite", {}),
    "granite_moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_moe_hybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "granite_moe_shared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
    "hunyuan_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        {
            "head_dim": 16,
            "num_experts": 4,
            "moe_topk": [2, 2],
            "num_shared_expert": [1, 1],
            "use_mixed_mlp_moe": True,
            "moe_intermediate_size": [96, 96],
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "block_ff_dim": 96,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
            "layer_types": ["conv", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "mamba": ("Mamba", {"state_size": 16, "expand": 2, "tie_word_embeddings": True}),
    "mamba2": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16, "expand": 2, "tie_word_embeddings": True},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "ministral": ("Ministral", {"head_dim": 16}),
    "ministral3": ("Ministral3", {"head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 16}),
    "nemotron": ("Nemotron", {}),
    "nemotron_h": (
        "NemotronH",
        {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "hybrid_override_pattern": "M*-"},
    ),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
    "persimmon": ("Persimmon", {"num_key_value_heads": 4}),
    "phi3": ("Phi3", {}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, **MIXTURE, "shared_expert_intermediate_size": 32}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "num_experts": 4,
            **MIXTURE,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {"tie_word_embeddings": True}),
    "zamba2": (
        "Zamba2",
        {
            "layer_types": ["mamba", "hybrid"],
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "num_key_value_heads": 4,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "tie_word_embeddings": True,
        },
    ),
}


REFUSED = {"phi": ("Phi", {"num_key_value_heads": 4})}
FAMILIES = SHORT | LONG | REFUSED
# one that is only used in a mixture's config
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
# vLLM has no pipeline stages for the first two, none for one dense layer of GLM-4.5 and 4.7, and none for layers that share
# keys and values, as the last one's do. Its loader of Granite's hybrid fails.
UNSTAGED = {"mamba2", "zamba2", "glm4_moe", "glm4_moe_lite", "granite_moe_hybrid", "gemma4_per_layer"}


def save_config(family: str, folder: Path) -> None:
    kind, more = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **more})
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)


def rank_model(
    folder: Path, rank: int, tensor: int = 1, stages: int = 1, experts: bool = False, dtype: str = "float32"
) -> contextlib.AbstractContextManager[torch.nn.Module]:
    """Return vLLM's model of a checkpoint on rank `rank` of an engine of tensor * stages ranks, with its raw parameters.

    Takes the process's default group, so no engine may live in it.
    """
    from pipeline.generate import vllm_rank

    latent = '"kv_lora_rank"' in (folder / "config.json").read_text()
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": 64,
        "enforce_eager": True,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": stages,
        "enable_expert_parallel": experts,
        # With AMX, vLLM's kernel for latent attention has no float32.
        "attention_backend": "CPU_MLA" if dtype == "float32" and latent else None,
    }
    return vllm_rank.rank_model(arguments, rank)
