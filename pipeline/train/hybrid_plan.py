"""Tensor-parallel styles of hybrid models' attention and MLPs, which transformers' plans for these models leave out.

transformers' plans of models with state spaces or short convolutions are empty, or name the head alone. The attention and MLPs
of these models are like those of other decoders, so this file recognizes them by the names of their linear layers. Everything
else stays whole: mixers, routers, projections to the latent of experts, and blocks with other linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from pipeline.train.adapters.linear import AdaptedLinear

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj"})
# (layers whose rows are cut, the layer whose columns are cut). The names are all linear layers of the block.
_CUT = [
    (_ATTENTION, "o_proj"),
    (_ATTENTION, "out_proj"),  # LFM2
    (frozenset({"gate_proj", "up_proj"}), "down_proj"),
    (frozenset({"up_proj"}), "down_proj"),  # Nemotron-H
    (frozenset({"w1", "w3"}), "w2"),  # LFM2
]
# (layer of a gate and an input together, the layer after them). Activations between the two are whole.
_JOINT = [("input_linear", "output_linear")]  # Granite 4


def block_styles(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return {layer's name: transformers' name of its style} for the layers in `blocks`, {name: module}."""
    styles: dict[str, str] = {}
    for name, block in blocks.items():
        styles |= {f"{name}.{child}": style for child, style in _of_block(block).items()}
    return styles


def _of_block(block: nn.Module) -> dict[str, str]:
    linear = {name for name, child in block.named_children() if isinstance(child, (nn.Linear, AdaptedLinear))}
    for joint, last in _JOINT:
        if linear == {joint, last}:
            return {joint: "colwise_gather_output", last: "rowwise_split_input"}
    for first, last in _CUT:
        if linear == {*first, last}:
            return _cut(block, first, last)
    return {}


def _cut(block: nn.Module, first: frozenset[str], last: str) -> dict[str, str]:
    """Return {child: style} of a block; {} if it has parameters besides its linear layers and norms of its heads."""
    norms = {name: child for name, child in block.named_children() if name not in first and name != last}
    norms = {name: child for name, child in norms.items() if next(child.parameters(), None) is not None}
    width = getattr(block, "head_dim", None)
    if any(tuple(p.shape) != (width,) for child in norms.values() for p in child.parameters()):
        return {}
    if next(block.parameters(recurse=False), None) is not None:
        return {}
    return {
        **dict.fromkeys(sorted(first), "colwise"),
        **dict.fromkeys(norms, "replicated_with_grad_allreduce"),
        last: "rowwise",
    }
