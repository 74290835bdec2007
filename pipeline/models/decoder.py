"""Parts of the Megatron-Core configuration and of the parameters that families of causal decoders share.

Functions under "parameters" take the Megatron name and the Hugging Face name of a module and return {Megatron name: Parameter}.
The functions of tensors are at module level and take sizes through functools.partial, so that `record` recognises equal calls
and one recording serves all layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.models.family import SCORE, VALUE_HEAD, Parameter, Split, unsupported_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from pipeline.types import Head


# ---- configuration
def require(config: PreTrainedConfig, **values: Any) -> None:
    """Raise RecipeError if an attribute of the config has another value than in `values`."""
    for name, expected in values.items():
        value = getattr(config, name)
        if value != expected:
            raise unsupported_model(f"{config.model_type} with {name}={value!r} is not supported; expected {expected!r}")


def rotary(config: PreTrainedConfig, *kinds: str, partial: bool = False) -> dict[str, Any]:
    """Return the config's RoPE parameters. Raises RecipeError if their type is not one of `kinds`.

    partial: whether the family's module describes RoPE on only a part of each head; if not, such RoPE raises RecipeError.
    """
    parameters = config.rope_parameters
    _check_rotary(config, parameters, kinds, partial)
    return parameters


def _check_rotary(config: PreTrainedConfig, parameters: dict[str, Any], kinds: tuple[str, ...], partial: bool) -> None:
    kind = parameters.get("rope_type", "default")
    if kind not in kinds:
        described = ", ".join(kinds)
        raise unsupported_model(f"{config.model_type} with RoPE of type '{kind}' is not supported; expected one of {described}")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0 and (kind != "default" or not partial):
        raise unsupported_model(
            f"{config.model_type} with a partial_rotary_factor and RoPE of type '{kind}' is not supported; expected 1.0"
        )


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return TransformerConfig arguments of a usual layer: gated MLP with SiLU, RMSNorm before attention and MLP, no biases."""
    require(config, hidden_act="silu")
    return {**block(config), "activation_func": "silu"}


def block(config: PreTrainedConfig) -> dict[str, Any]:
    """Return TransformerConfig arguments for the sizes and norms of a layer with a gated MLP, without the MLP's activation."""
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


def grouped_query_attention(config: PreTrainedConfig, partial: bool = False) -> dict[str, Any]:
    """Return TransformerConfig arguments for the sizes and windows of grouped-query attention.

    They have no rotary frequencies, which transformers derives. partial: as in `rotary`. Raises RecipeError as `rotary` does.
    """
    kinds = ("default", "linear", "llama3", "yarn")
    of_layers = layer_rotary(config)
    for parameters in [config.rope_parameters[kind] for kind in set(of_layers)] if of_layers else [config.rope_parameters]:
        _check_rotary(config, parameters, kinds, partial)
    return {
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        **windows(config),
    }


def layer_rotary(config: PreTrainedConfig) -> tuple[str, ...] | None:
    """Return the key of each layer in rope_parameters; None if all layers have the same RoPE."""
    kinds = getattr(config, "layer_types", None)
    return tuple(kinds) if kinds and all(kind in config.rope_parameters for kind in kinds) else None


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configuration of each layer, which differ in Gemma 4's numbers and sizes of heads."""
    different = getattr(config, "is_heterogeneous", False)
    return [config.per_layer_config[i] if different else config for i in range(config.num_hidden_layers)]


def windows(config: PreTrainedConfig) -> dict[str, Any]:
    """Return TransformerConfig arguments for sliding windows; {} if no layer has one.

    Without layer_types all layers have the window. The config's window includes a token's own key.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if window is None or not any(slides):
        return {}
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": slides}


# ---- functions of Hugging Face tensors
def identity(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself. A function at module level, so that one recording serves all parameters of a shape."""
    return tensor


def concatenate(*projections: torch.Tensor) -> torch.Tensor:
    """Concatenate projections along their outputs. For example gate and up, both [I, H], become [2 I, H]."""
    import torch  # needs torch, which submission may lack

    return torch.cat(projections)


def query_groups(groups: int, *projections: torch.Tensor) -> torch.Tensor:
    """Interleave queries, keys and values, if there are any, by group: each group's queries, then its key, then its value.

    query [heads D, ...], key and value [groups D, ...] -> [(heads + 2 groups) D, ...].
    """
    import torch  # needs torch, which submission may lack

    return torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in projections], 1).flatten(0, 1)


# ---- parameters
def unchanged(target: str, source: str, split: Split = "none", expert: int | None = None) -> dict[str, Parameter]:
    """Return {target: parameter} of a parameter that equals one Hugging Face tensor."""
    return {target: Parameter((source,), identity, split, expert)}


def model(config: PreTrainedConfig, layers: dict[str, Parameter], head: Head) -> dict[str, Parameter]:
    """Return all parameters of a model: embedding, the given layers, final norm, and the output layer or value head."""
    output = {} if config.tie_word_embeddings else unchanged("output_layer.weight", "lm_head.weight", "rows")
    return {
        **unchanged("embedding.word_embeddings.weight", "model.embed_tokens.weight", "rows"),
        **layers,
        **unchanged("decoder.final_layernorm.weight", "model.norm.weight"),
        **(unchanged(VALUE_HEAD, SCORE) if head == "values" else output),
    }


def sandwich_norms(target: str, source: str, names: tuple[str, str, str, str]) -> dict[str, Parameter]:
    """Return the four norms of a layer. names: their Hugging Face names, before and after attention, before and after MLP."""
    megatron_names = ("input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    parameters: dict[str, Parameter] = {}
    for ours, theirs in zip(megatron_names, names, strict=True):
        parameters |= unchanged(f"{target}.{ours}.weight", f"{source}.{theirs}.weight")
    return parameters


def norms(target: str, source: str) -> dict[str, Parameter]:
    """Return the norms before a layer's attention and before its MLP."""
    return {
        **unchanged(f"{target}.input_layernorm.weight", f"{source}.input_layernorm.weight"),
        **unchanged(f"{target}.pre_mlp_layernorm.weight", f"{source}.post_attention_layernorm.weight"),
    }


def attention(
    config: PreTrainedConfig, target: str, source: str, bias: bool, head_norms: bool, projections: str = "qkv"
) -> dict[str, Parameter]:
    """Return the parameters of grouped-query attention.

    bias: whether queries, keys and values have biases. head_norms: whether queries and keys have norms. projections: "qk" where
    values are the projected keys.
    """
    groups = partial(query_groups, config.num_key_value_heads)
    parameters = {
        f"{target}.linear_qkv.{kind}": Parameter(tuple(f"{source}.{part}_proj.{kind}" for part in projections), groups, "rows")
        for kind in (["weight", "bias"] if bias else ["weight"])
    }
    if head_norms:
        for part in "qk":
            parameters |= unchanged(f"{target}.{part}_layernorm.weight", f"{source}.{part}_norm.weight")
    return parameters | unchanged(f"{target}.linear_proj.weight", f"{source}.o_proj.weight", "columns")


def mlp(
    target: str, source: str, expert: int | None = None, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Parameter]:
    """Return the parameters of a gated MLP. expert: its number if it is an expert of a mixture."""
    gate, up, down = (f"{source}.{name}.weight" for name in names)
    return {
        f"{target}.linear_fc1.weight": Parameter((gate, up), concatenate, "halves", expert),
        **unchanged(f"{target}.linear_fc2.weight", down, "columns", expert),
    }


def experts(
    count: int, target: str, source: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Parameter]:
    """Return the parameters of a router and its `count` experts."""
    parameters = unchanged(f"{target}.router.weight", f"{source}.gate.weight")
    for expert in range(count):
        parameters |= mlp(f"{target}.experts.local_experts.{expert}", f"{source}.experts.{expert}", expert, names)
    return parameters
