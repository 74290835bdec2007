"""Shared by the families of causal decoders: parts of their Megatron-Core configuration, and makers of their parameters.

Makers take the Megatron and the Hugging Face name of a module and give {Megatron name: Parameter}. The functions stand at the
top level and take their sizes through functools.partial, so that one recording serves all layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.models.base import SCORE, VALUE_HEAD, Parameter, Split

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from pipeline.types import Head


# ---- configuration
def require(config: PreTrainedConfig, **values: Any) -> None:
    """Raises ValueError unless the config's attributes are these."""
    for name, value in values.items():
        found = getattr(config, name)
        if found != value:
            raise ValueError(f"policy.model_name: {config.model_type} with {name}={found!r} is not described; {value!r} is")


def rotary(config: PreTrainedConfig, *kinds: str) -> dict[str, Any]:
    """The config's RoPE parameters. Raises ValueError if they are not of these kinds, or turn a part of each head only."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in kinds:
        raise ValueError(
            f"policy.model_name: {config.model_type} with RoPE of type '{kind}' is not described; {', '.join(kinds)} are"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"policy.model_name: {config.model_type} with a partial_rotary_factor is not described")
    return parameters


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what is the same for all: a gated MLP with SiLU, RMSNorm before each half of a layer, no biases."""
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
    """Rotary frequencies are not here: transformers derives them from the config."""
    rotary(config, "default", "linear", "llama3", "yarn")
    return {
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }


# ---- functions of Hugging Face tensors
def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def gate_and_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two [I, H] -> [2 I, H]."""
    import torch

    return torch.cat([gate, up])


def query_groups(groups: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[heads D, ...], [groups D, ...] twice -> [(heads + 2 groups) D, ...]: for each group its queries, its key, its value."""
    import torch

    parts = [tensor.unflatten(0, (groups, -1)) for tensor in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


# ---- parameters
def unchanged(target: str, source: str, split: Split = "none", expert: int | None = None) -> dict[str, Parameter]:
    """A parameter that is a Hugging Face tensor as it is."""
    return {target: Parameter((source,), identity, split, expert)}


def model(config: PreTrainedConfig, layers: dict[str, Parameter], head: Head) -> dict[str, Parameter]:
    """All parameters, given those of the layers."""
    output = {} if config.tie_word_embeddings else unchanged("output_layer.weight", "lm_head.weight", "rows")
    return {
        **unchanged("embedding.word_embeddings.weight", "model.embed_tokens.weight", "rows"),
        **layers,
        **unchanged("decoder.final_layernorm.weight", "model.norm.weight"),
        **(unchanged(VALUE_HEAD, SCORE) if head == "values" else output),
    }


def norms(target: str, source: str) -> dict[str, Parameter]:
    """Those before a layer's attention and before its MLP."""
    return {
        **unchanged(f"{target}.input_layernorm.weight", f"{source}.input_layernorm.weight"),
        **unchanged(f"{target}.pre_mlp_layernorm.weight", f"{source}.post_attention_layernorm.weight"),
    }


def attention(config: PreTrainedConfig, target: str, source: str, bias: bool, head_norms: bool) -> dict[str, Parameter]:
    """Grouped-query attention; `bias` on queries, keys and values; `head_norms` of queries and keys."""
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
    """A gated MLP, or one expert."""
    gate, up, down = (f"{source}.{name}.weight" for name in names)
    return {
        f"{target}.linear_fc1.weight": Parameter((gate, up), gate_and_up, "halves", expert),
        **unchanged(f"{target}.linear_fc2.weight", down, "columns", expert),
    }


def experts(
    count: int, target: str, source: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Parameter]:
    """A router and its experts."""
    found = unchanged(f"{target}.router.weight", f"{source}.gate.weight")
    for expert in range(count):
        found |= mlp(f"{target}.experts.local_experts.{expert}", f"{source}.experts.{expert}", expert, names)
    return found
