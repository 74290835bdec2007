"""Compute a model's sizes and parameter counts from transformers' configuration and its model on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import Problem, RecipeError
from pipeline.models import decoder, nemotron_h, qwen3_5
from pipeline.models.mixers import STATEFUL, DeltaNet, StateSpace
from pipeline.models.tensors import Tensor, can_describe, tensors


class UnknownShape(RecipeError):
    """Raised for a model with mixers that Hetstep cannot describe, and without torch. FSDP2 may still train the model."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a language model. A critic or a reward model has a value head of `hidden` parameters in place of `output`."""

    family: str  # model_type
    layers: int
    kinds: tuple[str, ...]  # of each layer: dense (with an MLP) or sparse; of a hybrid model, transformers' name
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
    latent: bool  # whether attention caches a latent that all heads share, as DeepSeek's does (MLA)
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

        Imports torch and transformers; raises UnknownShape without them, for a model that transformers cannot build, and for
        other mixers than attention, Mamba-2 and gated delta nets.
        """
        if not can_describe():
            message = "torch and transformers describe models, and are not installed here. Try a machine with them (make setup)"
            raise UnknownShape(Problem(key, "not-installed", message))
        from pipeline.models import hugging_face

        try:
            return _shape(hugging_face.config_of(config), tensors(config))
        except RecipeError as error:
            raise UnknownShape(*(Problem(key, problem.code, problem.message) for problem in error.problems)) from None
        except (AttributeError, ValueError) as error:  # a configuration without the usual sizes
            message = f"the sizes of '{config.get('model_type')}' models are not known: {error}"
            raise UnknownShape(Problem(key, "unsupported", message)) from error


def _shape(of: Any, model_tensors: list[Tensor]) -> ModelShape:
    if unknown := next((tensor.name for tensor in model_tensors if tensor.part == "unknown"), None):
        raise ValueError(f"the part of {unknown} in the model")
    parts = _parts(model_tensors)
    layers = _layers(model_tensors, of.num_hidden_layers)
    sparse, kinds = [layer["routed"] > 0 for layer in layers], _hybrid_kinds(of)
    with_attention = [kind not in STATEFUL and layer["attention"] > 0 for kind, layer in zip(kinds, layers, strict=True)]
    first_attention = layers[with_attention.index(True)]
    sparse_layer = layers[sparse.index(True)] if any(sparse) else Counter()
    mlps, mixtures, hybrid = sum(layer["mlp"] > 0 for layer in layers), sum(sparse), any(kind in STATEFUL for kind in kinds)
    latent, heads = hasattr(of, "kv_lora_rank"), of.num_attention_heads
    kv_heads = getattr(of, "num_key_value_heads", None) or heads
    head_dim = getattr(of, "head_dim", None) or of.hidden_size // heads
    gated = any("gate_" in tensor.name or ".w3." in tensor.name for tensor in model_tensors)
    experts = (getattr(of, name, 0) for name in ("n_routed_experts", "num_local_experts", "num_experts"))
    windows = decoder.windows(of)
    return ModelShape(
        family=of.model_type,
        layers=len(layers),
        kinds=tuple(kinds) if hybrid else tuple("sparse" if routed else "dense" for routed in sparse),
        sparse=tuple(sparse),
        attention_layers=sum(with_attention),
        dense_layers=len(layers) - mixtures,
        sparse_layers=mixtures,
        hidden=of.hidden_size,
        vocabulary=of.vocab_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=of.qk_nope_head_dim + of.qk_rope_head_dim if latent else head_dim,
        value_dim=of.v_head_dim if latent else head_dim,
        kv_width=of.kv_lora_rank + of.qk_rope_head_dim if latent else 2 * kv_heads * head_dim,
        dense_width=of.intermediate_size if mlps else 0,
        mlp_layers=mlps,
        experts=next(filter(None, experts)) if mixtures else 0,
        experts_per_token=of.num_experts_per_tok if mixtures else 0,
        expert_width=(getattr(of, "moe_intermediate_size", None) or of.intermediate_size) if mixtures else 0,
        expert_input=getattr(of, "moe_latent_size", None) or of.hidden_size,
        gated=gated,
        shared_width=sparse_layer["shared"] // ((3 if gated else 2) * of.hidden_size),
        tied=bool(of.tie_word_embeddings),
        latent=latent,
        embedding=parts["embedding"] + parts["output"],
        attention=parts["attention"],
        mlp=parts["mlp"] + parts["shared"],
        routed=parts["routed"],
        other=parts["norm"] + parts["router"],
        output=parts["output"],
        largest_layer=max(layer.total() for layer in layers),
        attention_layer=round(parts["attention"] / len(layers)) if hybrid else first_attention["attention"],
        norms_layer=first_attention["norm"],
        mlp_layer=round(parts["mlp"] / max(1, len(layers) - mixtures)),
        sparse_layer=sum(sparse_layer[part] for part in ("shared", "routed", "router")),
        window=windows["window_size"][0] + 1 if windows else 0,
        window_layers=sum(windows.get("window_attn_skip_freq", ())),
        state=_state(of) if hybrid else None,
        tensors=tuple(model_tensors),
    )


def _layers(model_tensors: Iterable[Tensor], count: int) -> list[Counter[str]]:
    """Return, for each of `count` layers, part -> its number of parameters."""
    by_layer: list[list[Tensor]] = [[] for _ in range(count)]
    for tensor in model_tensors:
        if tensor.layer is not None and tensor.layer < count:
            by_layer[tensor.layer].append(tensor)
    return [_parts(layer) for layer in by_layer]


def _hybrid_kinds(of: Any) -> list[str]:
    """Return transformers' name of each layer's kind; "full_attention" where the configuration does not list kinds."""
    kinds = getattr(of, "layers_block_type", None) or getattr(of, "layer_types", None)
    return list(kinds or ["full_attention"] * of.num_hidden_layers)


def _state(of: Any) -> StateSpace | DeltaNet:
    """Return the sizes of the mixers that are not attention. Raises UnknownShape."""
    if of.model_type == "nemotron_h":
        return nemotron_h.state_space(of)
    if of.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        return qwen3_5.delta_net(of)
    message = f"the mixers of '{of.model_type}' models are not known; expected attention, Mamba-2 or gated delta nets"
    raise UnknownShape(Problem("policy.model_name", "unsupported", message))


def _parts(model_tensors: Iterable[Tensor]) -> Counter[str]:
    """Return part of the model -> its number of parameters, without buffers."""
    counts: Counter[str] = Counter()
    for tensor in model_tensors:
        if tensor.part != "buffer":
            counts[tensor.part] += tensor.numel
    return counts
