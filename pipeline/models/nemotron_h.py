"""Nemotron-H, Nemotron Nano v2 and Nemotron 3 (https://arxiv.org/abs/2504.03624): Mamba-2, attention, MLPs and experts.

Each layer is one of these four, with one norm and one residual. Attention has no position embedding. MLPs and experts have
squared ReLU and no gate. The router chooses experts as in DeepSeek-V3, and experts may work on a latent of the hidden states.

Steps of the state space are at least time_step_min, as in transformers. vLLM has no such bound.
Not supported: the layers for multi-token prediction, which transformers does not load either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import SCORE, VALUE_HEAD, Features, Parameter, unsupported_model
from pipeline.models.mixers import Layer, StateSpace

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def state_space(config: PreTrainedConfig) -> StateSpace:
    """Return the sizes of the Mamba-2 layers."""
    return StateSpace(
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        groups=config.n_groups,
        state=config.ssm_state_size,
        kernel=config.conv_kernel,
        chunk=config.chunk_size,
        smallest_step=config.time_step_min,
        epsilon=config.layer_norm_epsilon,
    )


def features(config: PreTrainedConfig) -> Features:
    """Return the kind of each layer."""
    mixers = {"linear_attention": state_space(config), "full_attention": "attention"}
    layers = tuple(Layer(mixers.get(kind), kind in ("mlp", "moe")) for kind in config.layers_block_type)
    return Features(rotary=False, layers=layers)


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for biases, activations and routing that are not described."""
    decoder.require(config, use_bias=False, mlp_bias=False, use_conv_bias=True, mlp_hidden_act="relu2", mamba_hidden_act="silu")
    decoder.require(config, tie_word_embeddings=False)  # transformers does not tie them
    return {
        "num_layers": len(config.layers_block_type),
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "gated_linear_unit": False,
        "activation_func": "relu2",
        "add_bias_linear": False,
        **(_mixture(config) if "moe" in config.layers_block_type else {}),
    }


def _mixture(config: PreTrainedConfig) -> dict[str, Any]:
    topk, groups, chosen = config.num_experts_per_tok, config.n_group, config.topk_group
    decoder.require(config, norm_topk_prob=topk > 1)  # Megatron-Core's rule for sigmoid scores
    if chosen < groups:
        raise unsupported_model(
            f"nemotron_h with n_group={groups} and topk_group={chosen} is not supported; expected topk_group=n_group"
        )
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_layer_freq": [int(kind == "moe") for kind in config.layers_block_type],
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    by_name = decoder.unchanged("embedding.word_embeddings.weight", "backbone.embeddings.weight", "rows")
    for i, kind in enumerate(config.layers_block_type):
        target, source = f"decoder.layers.{i}", f"backbone.layers.{i}"
        norm = "input_layernorm" if kind in ("linear_attention", "full_attention") else "pre_mlp_layernorm"
        by_name |= decoder.unchanged(f"{target}.{norm}.weight", f"{source}.norm.weight")
        source = f"{source}.mixer"
        match kind:
            case "linear_attention":
                by_name |= _state_space(config, f"{target}.self_attention", source)
            case "full_attention":
                by_name |= decoder.attention(config, f"{target}.self_attention", source, bias=False, head_norms=False)
            case "mlp":
                by_name |= _mlp(f"{target}.mlp", source)
            case _:
                by_name |= _experts(config, f"{target}.mlp", source)
    by_name |= decoder.unchanged("decoder.final_layernorm.weight", "backbone.norm_f.weight")
    if head == "values":
        return by_name | decoder.unchanged(VALUE_HEAD, SCORE)
    return by_name | decoder.unchanged("output_layer.weight", "lm_head.weight", "rows")


def _state_space(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    sizes = state_space(config)
    return {
        **decoder.unchanged(f"{target}.in_proj.weight", f"{source}.in_proj.weight", sizes.projected),
        **decoder.unchanged(f"{target}.conv_weight", f"{source}.conv1d.weight", sizes.convolved),
        **decoder.unchanged(f"{target}.conv_bias", f"{source}.conv1d.bias", sizes.convolved),
        **decoder.unchanged(f"{target}.dt_bias", f"{source}.dt_bias", "rows"),
        **decoder.unchanged(f"{target}.A_log", f"{source}.A_log", "rows"),
        **decoder.unchanged(f"{target}.D", f"{source}.D", "rows"),
        **decoder.unchanged(f"{target}.norm_weight", f"{source}.norm.weight", "rows"),
        **decoder.unchanged(f"{target}.out_proj.weight", f"{source}.out_proj.weight", "columns"),
    }


def _mlp(target: str, source: str, expert: int | None = None) -> dict[str, Parameter]:
    return {
        **decoder.unchanged(f"{target}.linear_fc1.weight", f"{source}.up_proj.weight", "rows", expert),
        **decoder.unchanged(f"{target}.linear_fc2.weight", f"{source}.down_proj.weight", "columns", expert),
    }


def _experts(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    by_name = {
        **decoder.unchanged(f"{target}.router.weight", f"{source}.gate.weight"),
        **decoder.unchanged(f"{target}.router.expert_bias", f"{source}.gate.e_score_correction_bias"),
    }
    for i in range(config.n_routed_experts):
        by_name |= _mlp(f"{target}.experts.local_experts.{i}", f"{source}.experts.{i}", i)
    if config.moe_latent_size is not None:
        for name in ("fc1_latent_proj", "fc2_latent_proj"):
            by_name |= decoder.unchanged(f"{target}.{name}.weight", f"{source}.{name}.weight")
    return by_name | _mlp(f"{target}.shared_experts", f"{source}.shared_experts")
