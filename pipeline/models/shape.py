"""Compute a model's sizes and parameter counts from its config.json, without torch.

The counts equal those of transformers' modules, biases included, for every family that `pipeline.models.tensors` describes:
all families of the Megatron backend, and some that only FSDP2 trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pipeline.config import Problem, RecipeError
from pipeline.models import decoder, nemotron_h, qwen3_5, sizes
from pipeline.models.config_json import parse_config
from pipeline.models.mixers import DeltaNet, StateSpace
from pipeline.models.tensors import Tensor, experts, tensors


class UnknownShape(RecipeError):
    """Raised for a family whose sizes cannot be computed from config.json alone. FSDP2 may still train the model."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a language model. A critic or a reward model has a value head of `hidden` parameters in place of `output`."""

    family: str  # model_type
    layers: int
    kinds: tuple[str, ...]  # of each layer, as `pipeline.models.sizes.layer_kinds` returns them
    sparse: tuple[bool, ...]  # of each layer, whether it has experts
    attention_layers: int  # layers with attention, not a state space or a delta net
    dense_layers: int  # layers without experts: with an MLP, but for hybrid models' other layers
    sparse_layers: int  # layers with a mixture of experts
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int  # size of a query and a key
    value_dim: int  # size of a value
    kv_width: int  # values that generation caches per token and layer
    dense_width: int  # intermediate size of the layers with an MLP; 0 if there are none
    mlp_layers: int  # layers with an MLP
    experts: int  # routed experts of each sparse layer; 0 if there are none
    experts_per_token: int
    expert_width: int
    expert_input: int  # size of the input of routed experts: hidden, or a latent
    gated: bool  # whether MLPs and experts have a gate: three matrices, otherwise two
    shared_width: int  # sum over the experts that every token passes
    tied: bool  # whether the output layer is the embedding
    # Parameters of the whole model, by part
    embedding: int  # with the output layer, unless tied
    attention: int
    mlp: int  # with shared experts
    routed: int  # routed experts
    other: int  # norms and routers
    output: int  # the output layer, part of `embedding`; 0 if tied
    # Parameters of one layer
    largest_layer: int  # the whole largest layer
    attention_layer: int  # of a hybrid model: attention and state spaces, the mean over all layers
    norms_layer: int  # of a layer with attention; of Nemotron-H, any layer's
    mlp_layer: int  # the MLP of a dense layer; 0 if there are none; of a hybrid model: the mean over layers without experts
    sparse_layer: int  # the mixture of a sparse layer, with router and shared experts; 0 if there are none
    window: int  # keys that a layer with a sliding window sees; 0 if no layer has one
    window_layers: int  # layers with a sliding window
    state: StateSpace | DeltaNet | None  # the mixers that are not attention, if there are any
    tensors: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)  # on disk, buffers included

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.embedding + self.attention + self.mlp + self.routed + self.other

    @property
    def active(self) -> int:
        """Number of parameters in the matrix products of one token.

        Only the chosen routed experts count. The output layer counts, but not the embedding of the input, a table lookup.
        """
        chosen = self.routed * self.experts_per_token // self.experts if self.experts else 0
        return self.vocabulary * self.hidden + self.attention + self.mlp + chosen + self.other

    def cached_tokens(self, length: float) -> float:
        """Return how many of a sequence's `length` tokens generation caches: the mean over layers with attention."""
        beyond = max(0.0, length - self.window) if self.window_layers else 0.0
        return length - beyond * self.window_layers / max(1, self.attention_layers)

    @property
    def latent(self) -> bool:
        """Return whether attention caches a latent that all heads share, as DeepSeek's does (MLA)."""
        return self.family == "deepseek_v3"

    @property
    def mixture(self) -> bool:
        """Return whether layers have experts, state spaces or delta nets, which FSDP2 does not compile by default."""
        return self.experts > 0 or self.state is not None

    @property
    def mean_width(self) -> float:
        """Mean intermediate size of MLPs over all layers without experts; a layer without an MLP counts as 0."""
        return self.dense_width * self.mlp_layers / max(1, self.dense_layers)

    @property
    def state_layers(self) -> int:
        """Number of layers with a state space or a delta net."""
        return self.kinds.count("linear_attention")

    @property
    def routed_layer(self) -> int:
        """Number of parameters of one sparse layer's routed experts."""
        return self.routed // max(1, self.sparse_layers)

    @property
    def shared_layer(self) -> int:
        """Number of parameters of one sparse layer's shared experts."""
        return (3 if self.gated else 2) * self.hidden * self.shared_width

    @property
    def router_layer(self) -> int:
        """Number of parameters of one sparse layer's router, including the projections to and from its experts' latent."""
        return self.sparse_layer - self.shared_layer - self.routed_layer

    @classmethod
    def of(cls, config: Mapping[str, Any], key: str = "policy.model_name") -> ModelShape:
        """Return the shape of the model with this config.json. key: the recipe's key of the model's name.

        Raises UnknownShape for a family that is not in `pipeline.models.sizes.MODEL_TYPES`, and RecipeError for a missing key.
        """
        try:
            return _shape(sizes.sizes(config), tensors(config), decoder.windows(parse_config(config)))
        except KeyError as error:
            why = f"config.json of this {config['model_type']} model has no {error}. Try to download the model again"
            raise RecipeError(Problem(key, "missing-value", why)) from None
        except ValueError as error:
            raise UnknownShape(Problem(key, "unsupported", str(error))) from None


def _shape(of: SimpleNamespace, model_tensors: list[Tensor], windows: Mapping[str, Any]) -> ModelShape:
    kinds = sizes.layer_kinds(of)
    parts = _parts(model_tensors)
    first = {kind: _parts([t for t in model_tensors if t.layer == kinds.index(kind)]) for kind in dict.fromkeys(kinds)}
    mlps = sum(first[kind]["mlp"] > 0 for kind in kinds)
    mixtures = sum(first[kind]["routed"] > 0 for kind in kinds)
    sparse_layer = next((layer for layer in first.values() if layer["routed"]), Counter())
    latent, apart = of.model_type == "deepseek_v3", of.model_type == "nemotron_h"  # apart: one part in each layer
    hybrid = apart or "linear_attention" in kinds
    expert_width = (getattr(of, "moe_intermediate_size", 0) or of.intermediate_size) if mixtures else 0
    attention_parts = first.get("full_attention") or next(iter(first.values()))
    return ModelShape(
        family=of.model_type,
        layers=of.num_hidden_layers,
        kinds=tuple(kinds),
        sparse=tuple(sizes.sparse_layers(of)),
        attention_layers=kinds.count("full_attention") if hybrid else of.num_hidden_layers,
        dense_layers=len(kinds) - mixtures,
        sparse_layers=mixtures,
        hidden=of.hidden_size,
        vocabulary=of.vocab_size,
        heads=of.num_attention_heads,
        kv_heads=of.num_key_value_heads,
        head_dim=of.qk_nope_head_dim + of.qk_rope_head_dim if latent else of.head_dim,
        value_dim=of.v_head_dim if latent else of.head_dim,
        kv_width=of.kv_lora_rank + of.qk_rope_head_dim if latent else 2 * of.num_key_value_heads * of.head_dim,
        dense_width=of.intermediate_size if mlps else 0,
        mlp_layers=mlps,
        experts=experts(of) if mixtures else 0,
        experts_per_token=of.num_experts_per_tok if mixtures else 0,
        expert_width=expert_width,
        expert_input=(apart and of.moe_latent_size) or of.hidden_size,
        gated=not apart,
        shared_width=_shared_width(of, expert_width) if mixtures else 0,
        tied=of.tie_word_embeddings,
        embedding=parts["embedding"] + parts["output"],
        attention=parts["attention"],
        mlp=parts["mlp"] + parts["shared"],
        routed=parts["routed"],
        other=parts["norm"] + parts["router"],
        output=parts["output"],
        largest_layer=max(layer.total() for layer in first.values()),
        attention_layer=round(parts["attention"] / of.num_hidden_layers) if hybrid else attention_parts["attention"],
        norms_layer=of.hidden_size if apart else attention_parts["norm"],
        mlp_layer=round(parts["mlp"] / max(1, len(kinds) - mixtures)),
        sparse_layer=sum(sparse_layer[part] for part in ("shared", "routed", "router")),
        window=windows["window_size"][0] + 1 if windows else 0,
        window_layers=sum(windows.get("window_attn_skip_freq", ())),
        state=_state(of) if "linear_attention" in kinds else None,
        tensors=tuple(model_tensors),
    )


def _state(of: SimpleNamespace) -> StateSpace | DeltaNet:
    return nemotron_h.state_space(of) if of.model_type == "nemotron_h" else qwen3_5.delta_net(of)


def _shared_width(of: SimpleNamespace, expert_width: int) -> int:
    if of.model_type == "nemotron_h":
        return of.moe_shared_expert_intermediate_size
    if of.model_type == "qwen3_5_moe_text":
        return of.shared_expert_intermediate_size
    return expert_width * (getattr(of, "n_shared_experts", None) or 0)


def _parts(model_tensors: list[Tensor]) -> Counter[str]:
    """Return part of the model -> its number of parameters, without buffers."""
    counts: Counter[str] = Counter()
    for tensor in model_tensors:
        if tensor.part != "buffer":
            counts[tensor.part] += tensor.numel
    return counts
