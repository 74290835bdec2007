"""Qwen3.5's language model, dense and as a mixture of experts: gated delta nets, and gated attention in every fourth layer.

Norms multiply by 1 + weight; attention also has norms of queries and keys. RoPE rotates a quarter of each head. The output of
each attention head has a gate, whose rows follow those of the head's query in the projection. The router's softmax weighs the
routed experts, and a separate gate the shared expert.

Not supported: the layer for multi-token prediction, which transformers does not load.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Features, Parameter, unsupported_model
from pipeline.models.mixers import DeltaNet, Layer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def delta_net(config: PreTrainedConfig) -> DeltaNet:
    """Return the sizes of the gated delta nets."""
    return DeltaNet(
        groups=config.linear_num_key_heads,
        heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        epsilon=config.rms_norm_eps,
    )


def features(config: PreTrainedConfig) -> Features:
    """Return the mixer of each layer."""
    mixers = {"linear_attention": delta_net(config), "full_attention": "attention"}
    return Features(layers=tuple(Layer(mixers[kind], True) for kind in config.layer_types))


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for biases, activations and RoPE that are not described."""
    decoder.require(config, hidden_act="silu", attention_bias=False)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "layernorm_zero_centered_gamma": True,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        **decoder.grouped_query_attention(config, partial=True),
        "qk_layernorm": True,
        "attention_output_gate": True,
        **(_mixture(config) if _sparse(config) else {"ffn_hidden_size": config.intermediate_size}),
    }


def _sparse(config: PreTrainedConfig) -> bool:
    return config.model_type == "qwen3_5_moe_text"


def _mixture(config: PreTrainedConfig) -> dict[str, Any]:
    if config.num_experts_per_tok == 1:
        raise unsupported_model(f"{config.model_type} with num_experts_per_tok=1 is not supported: the router gets no gradient")
    return {
        "ffn_hidden_size": config.moe_intermediate_size,
        "num_moe_experts": config.num_experts,
        "moe_layer_freq": [1] * config.num_hidden_layers,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,  # a token's weights sum to 1
    }


# ---- functions of Hugging Face tensors
def gated_groups(groups: int, size: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Interleave queries, gates, keys and values by group: each group's queries, then their gates, its key and its value.

    size: the size D of a head. query: [heads 2 D, ...], with each head's gate after its query. key, value: [groups D, ...].
    Result: [(2 heads + 2 groups) D, ...].
    """
    import torch  # needs torch, which submission may lack

    heads = query.unflatten(0, (groups, -1, 2, size))  # [groups, heads of a group, query or gate, D, ...]
    parts = [heads[:, i, kind] for kind in range(2) for i in range(heads.size(1))]
    parts += [tensor.unflatten(0, (groups, size)) for tensor in (key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


# ---- parameters
def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i, kind in enumerate(config.layer_types):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.norms(target, source)
        if kind == "linear_attention":
            layers |= _delta_net(config, f"{target}.self_attention", f"{source}.linear_attn")
        else:
            layers |= _attention(config, f"{target}.self_attention", f"{source}.self_attn")
        if _sparse(config):
            layers |= _experts(config, f"{target}.mlp", f"{source}.mlp")
        else:
            layers |= decoder.mlp(f"{target}.mlp", f"{source}.mlp")
    return decoder.model(config, layers, head)


def _attention(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    groups = partial(gated_groups, config.num_key_value_heads, config.head_dim)
    by_name = decoder.attention(config, target, source, bias=False, head_norms=True)
    joint = f"{target}.linear_qkv.weight"
    return {**by_name, joint: Parameter(by_name[joint].sources, groups, "rows")}


def _delta_net(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    sizes = delta_net(config)
    joint = tuple(f"{source}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    return {
        f"{target}.in_proj.weight": Parameter(joint, decoder.concatenate, sizes.projected),
        **decoder.unchanged(f"{target}.conv_weight", f"{source}.conv1d.weight", sizes.convolved),
        **decoder.unchanged(f"{target}.dt_bias", f"{source}.dt_bias", "rows"),
        **decoder.unchanged(f"{target}.A_log", f"{source}.A_log", "rows"),
        **decoder.unchanged(f"{target}.norm_weight", f"{source}.norm.weight"),
        **decoder.unchanged(f"{target}.out_proj.weight", f"{source}.out_proj.weight", "columns"),
    }


def _experts(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    return {
        **decoder.experts(config.num_experts, target, source),
        **decoder.mlp(f"{target}.shared_experts", f"{source}.shared_expert"),
        **decoder.unchanged(f"{target}.shared_experts.gate_weight", f"{source}.shared_expert_gate.weight"),
    }
