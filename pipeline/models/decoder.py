"""Parts that families of causal decoders share: of their Megatron-Core configuration, and of their parameters.

Functions under "parameters" take the Megatron name and the Hugging Face name of a module and return {Megatron name: Parameter}.
The functions of tensors are at module level and take sizes through functools.partial, so one recording serves all layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.models.base import SCORE, VALUE_HEAD, Parameter, Split, unsupported_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from pipeline.types import Head


# ---- configuration
def require(config: PreTrainedConfig, **values: Any) -> None:
    """Raise RecipeError unless the config's attributes have these values."""
    for name, value in values.items():
        found = getattr(config, name)
        if found != value:
            raise unsupported_model(f"{config.model_type} with {name}={found!r} is not described; expected {value!r}")


def rotary(config: PreTrainedConfig, *kinds: str) -> dict[str, Any]:
    """Return the config's RoPE parameters. Raises RecipeError for another kind, and for RoPE on a part of each head only."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in kinds:
        described = ", ".join(kinds)
        raise unsupported_model(f"{config.model_type} with RoPE of type '{kind}' is not described; expected one of {described}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported_model(f"{config.model_type} with a partial_rotary_factor is not described; expected 1.0")
    return parameters


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what all families share: a gated MLP with SiLU, RMSNorm before attention and before the MLP, no biases."""
    require(config, hidden_act="silu")
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
    }


def grouped_query_attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the sizes of grouped-query attention. Rotary frequencies are left out: transformers derives them."""
    rotary(config, "default", "linear", "llama3", "yarn")
    return {
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }


# ---- functions of Hugging Face tensors
def identity(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself: at module level, so that one recording serves all parameters of a shape."""
    return tensor


def gate_and_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Concatenate gate and up projections: two [I, H] -> [2 I, H]."""
    import torch

    return torch.cat([gate, up])


def query_groups(groups: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Interleave queries, keys and values by group: each group's queries, then its key, then its value.

    query [heads D, ...], key and value [groups D, ...] -> [(heads + 2 groups) D, ...].
    """
    import torch

    parts = [tensor.unflatten(0, (groups, -1)) for tensor in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


# ---- parameters
def unchanged(target: str, source: str, split: Split = "none", expert: int | None = None) -> dict[str, Parameter]:
    """Return a parameter that equals one Hugging Face tensor."""
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


def norms(target: str, source: str) -> dict[str, Parameter]:
    """Return the norms before a layer's attention and before its MLP."""
    return {
        **unchanged(f"{target}.input_layernorm.weight", f"{source}.input_layernorm.weight"),
        **unchanged(f"{target}.pre_mlp_layernorm.weight", f"{source}.post_attention_layernorm.weight"),
    }


def attention(config: PreTrainedConfig, target: str, source: str, bias: bool, head_norms: bool) -> dict[str, Parameter]:
    """Return grouped-query attention, with a `bias` of queries, keys and values, and with `head_norms` of queries and keys."""
    groups = partial(query_groups, config.num_key_value_heads)
    found = {
        f"{target}.linear_qkv.{kind}": Parameter(tuple(f"{source}.{part}_proj.{kind}" for part in "qkv"), groups, "rows")
        for kind in (["weight", "bias"] if bias else ["weight"])
    }
    if head_norms:
        for part in "qk":
            found |= unchanged(f"{target}.{part}_layernorm.weight", f"{source}.{part}_norm.weight")
    return found | unchanged(f"{target}.linear_proj.weight", f"{source}.o_proj.weight", "columns")


def mlp(
    target: str, source: str, expert: int | None = None, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Parameter]:
    """Return a gated MLP; with `expert`, that expert of a mixture."""
    gate, up, down = (f"{source}.{name}.weight" for name in names)
    return {
        f"{target}.linear_fc1.weight": Parameter((gate, up), gate_and_up, "halves", expert),
        **unchanged(f"{target}.linear_fc2.weight", down, "columns", expert),
    }


def experts(
    count: int, target: str, source: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Parameter]:
    """Return a router and its `count` experts."""
    found = unchanged(f"{target}.router.weight", f"{source}.gate.weight")
    for expert in range(count):
        found |= mlp(f"{target}.experts.local_experts.{expert}", f"{source}.experts.{expert}", expert, names)
    return found
