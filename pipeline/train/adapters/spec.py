"""Define the adapters of a model: W + scale B A, where A [dim, in] and B [out, dim] are trained and W [out, in] is frozen.

LoRA (https://arxiv.org/abs/2106.09685) scales by alpha / dim, rsLoRA (https://arxiv.org/abs/2312.03732) by alpha / sqrt(dim).
DoRA (https://arxiv.org/abs/2402.09353) also trains a magnitude m [out]: each row w of W + scale B A becomes m w / ||w||.

Adapters are Hugging Face tensors like weights. They have peft's names without its prefix, in checkpoints and between backends:

    model.layers.0.self_attn.q_proj.lora_A.weight            [dim, in]
    model.layers.0.self_attn.q_proj.lora_B.weight            [out, dim]
    model.layers.0.self_attn.q_proj.lora_magnitude_vector    [out], with DoRA
    model.layers.0.mlp.experts.3.gate_up_proj.lora_A.weight  one expert of a layer whose experts are bare parameters

Layers have their names on disk. Experts that transformers keeps in bare parameters have one adapter per expert. Its name is
transformers' name of the parameter with the expert's number: `gate_up_proj` (gate rows first, then up rows; in gpt-oss they
alternate) and `down_proj`. Experts without a gate have `up_proj`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config import LoRAConfig, Recipe, adapters

A = ".lora_A.weight"
B = ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"
PREFIX = "adapter."  # of the adapters' tensors in a checkpoint
IN_TRANSFORMERS = {".block_sparse_moe.": ".mlp.", "backbone.": "model."}
"""{part of the experts' name on disk: the same part in transformers}."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The options that all adapters of a model share."""

    dim: int
    alpha: float
    init: str  # of A: xavier, gaussian or kaiming
    dora: bool
    rslora: bool
    dropout: float  # probability, in training passes only
    dropout_input: bool  # dropout of the input of A; False: of the output of B

    @classmethod
    def of(cls, config: LoRAConfig) -> AdapterSpec:
        """Return the options that a recipe's section sets."""
        before = config.dropout_position == "pre"
        options = (config.lora_A_init, config.use_dora, config.use_rslora, config.dropout, before)
        return cls(config.dim, config.alpha, *options)

    @property
    def scale(self) -> float:
        """The factor by which B A is multiplied."""
        return self.alpha / (math.sqrt(self.dim) if self.rslora else self.dim)

    def shapes(self, layer: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Return {name on disk: shape} of the adapter's tensors of a layer whose weight is [rows, columns]."""
        shapes: dict[str, tuple[int, ...]] = {layer + A: (self.dim, columns), layer + B: (rows, self.dim)}
        return shapes | ({layer + MAGNITUDE: (rows,)} if self.dora else {})


def in_transformers(experts: str) -> str:
    """Return transformers' name of experts from their name on disk. The names differ for Mixtral and Nemotron-H."""
    for ours, theirs in IN_TRANSFORMERS.items():
        experts = experts.replace(ours, theirs)
    return experts


def layer_of(name: str) -> str | None:
    """Return the name of the layer that an adapter's tensor belongs to; None if `name` is not an adapter's tensor."""
    return next((name.removesuffix(suffix) for suffix in (A, B, MAGNITUDE) if name.endswith(suffix)), None)


def refits_adapters(recipe: Recipe) -> bool:
    """Return whether refits send only the policy's adapters. The engines of an evaluation always get merged weights."""
    adapted = adapters(recipe.policy) is not None and recipe.policy.generation.lora_refit == "adapter"
    return adapted and recipe.algorithm != "evaluate"
