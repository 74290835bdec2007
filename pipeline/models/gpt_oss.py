"""gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, sliding windows in every other layer, biases everywhere.

The experts' gate and up projections alternate in one tensor of all experts, and their activation is clamped.

Checkpoints in MXFP4, as OpenAI publishes them, are read in bfloat16 (mxfp4.py). Not supported: experts that tensor
parallelism splits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Features, Parameter, unsupported_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for biases, activations and routing that are not described."""
    decoder.require(config, hidden_act="silu", attention_bias=True, swiglu_alpha=1.702)  # quick_gelu's factor
    if config.num_experts_per_tok == 1:
        raise unsupported_model(
            "gpt_oss with num_experts_per_tok=1 is not supported: the router would get no gradient, since its weight is 1"
        )
    return {
        **decoder.block(config),
        **decoder.grouped_query_attention(config),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.swiglu_limit,
        "num_moe_experts": config.num_local_experts,
        "moe_layer_freq": [1] * config.num_hidden_layers,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,  # a softmax over the chosen experts' logits
    }


def features(config: PreTrainedConfig) -> Features:
    """Return the features that TransformerConfig cannot express."""
    return Features(alternating_experts=True)


# ---- parameters
def one_expert(expert: int, stacked: torch.Tensor) -> torch.Tensor:
    """Return one expert's part of a tensor of all experts: [E, ...] -> [...]."""
    return stacked[expert]


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i in range(config.num_hidden_layers):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        attention, source_attention = f"{target}.self_attention", f"{source}.self_attn"
        layers |= decoder.norms(target, source)
        layers |= decoder.unchanged(f"{attention}.core_attention.softmax_offset", f"{source_attention}.sinks", "rows")
        layers |= decoder.attention(config, attention, source_attention, bias=True, head_norms=False)
        layers |= decoder.unchanged(f"{attention}.linear_proj.bias", f"{source_attention}.o_proj.bias")
        for kind in ("weight", "bias"):
            layers |= decoder.unchanged(f"{target}.mlp.router.{kind}", f"{source}.mlp.router.{kind}")
        layers |= _experts(config, f"{target}.mlp.experts.local_experts", f"{source}.mlp.experts")
    return decoder.model(config, layers, head)


def _experts(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    """Return the parameters of the experts."""
    tensors = {
        "linear_fc1.weight": "gate_up_proj",
        "linear_fc1.bias": "gate_up_proj_bias",
        "linear_fc2.weight": "down_proj",
        "linear_fc2.bias": "down_proj_bias",
    }
    return {
        f"{target}.{expert}.{ours}": Parameter((f"{source}.{theirs}",), partial(one_expert, expert), expert=expert)
        for ours, theirs in tensors.items()
        for expert in range(config.num_local_experts)
    }
