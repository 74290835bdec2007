"""Compute a model's sizes and parameter counts from transformers' configuration and its model on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.config import Problem, RecipeError
from pipeline.models import decoder, nemotron_h, qwen3_5
from pipeline.models.mixers import STATEFUL, DeltaNet, StateSpace
from pipeline.models.tensors import Tensor, can_describe, tensors


class UnknownShape(RecipeError):
    """Raised for a model with mixers that Hetstep cannot describe, and without torch. FSDP2 may still train the model."""


class Cache(NamedTuple):
    """Keys and values of a layer."""

    heads: int
    head_dim: int
    slides: bool  # whether the layer has a sliding window


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
    head_dim: float  # size of a query and a key: the mean over layers with attention
    value_dim: float  # size of a value
    kv_width: float  # values that generation caches per token: the mean over layers with attention, some of which share a cache
    caches: tuple[Cache, ...]  # of each layer that has keys and values of its own; () if attention caches a latent
    dense_width: float  # intermediate size of the layers with an MLP: their mean; 0 if there are none
    mlp_layers: int  # layers with an MLP
    experts: int  # routed experts of each sparse layer; 0 if there are none
    experts_per_token: int
    expert_width: int
    expert_input: int  # size of the input of routed experts: hidden, or a latent
    gated: bool  # whether MLPs and experts have a gate: three matrices, otherwise two
    shared_width: int  # sum over the experts that every token passes, or of the MLP beside the experts
    tied: bool  # whether the output layer is the embedding
    latent: bool  # whether attention caches a latent that all heads share, as DeepSeek's does (MLA)
    # Parameters of the whole model, by part
    embedding: int  # with the output layer, unless tied
    attention: int
    mlp: int  # with shared experts
    routed: int  # routed experts
    other: int  # norms, routers and layer inputs
    layer_inputs: int  # projections of the embeddings that each layer adds (Gemma 4)
    output: int  # the output layer, part of `embedding`; 0 if tied
    # Parameters of one layer
    largest_layer: int  # the whole largest layer
    attention_layer: int  # attention and state spaces: the mean over all layers
    norms_layer: int  # of a layer with attention; of Nemotron-H, any layer's
    mlp_layer: int  # the MLP of a dense layer; 0 if there are none; of a hybrid model: the mean over layers without experts
    sparse_layer: int  # the mixture of a sparse layer, with router and shared experts; 0 if there are none
    window: int  # keys that a layer with a sliding window sees; 0 if no layer has one
    window_share: float  # the share of such layers in the values that generation caches
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
        return length - max(0.0, length - self.window) * self.window_share

    def rank_kv_width(self, tensor: int) -> float:
        """Return how many values one of `tensor` ranks caches per token: the mean over layers with attention.

        Ranks share heads where there are more of them. All ranks hold latents.
        """
        if self.latent:
            return self.kv_width
        return sum(2 * max(1, cache.heads // tensor) * cache.head_dim for cache in self.caches) / self.attention_layers

    @property
    def tables(self) -> int:
        """Return the number of parameters of embeddings besides those of the vocabulary [vocabulary, hidden] and the head."""
        return self.embedding - (1 if self.tied else 2) * self.vocabulary * self.hidden

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
    mixed = {
        tensor.layer for tensor in model_tensors if tensor.part == "routed"
    }  # an MLP beside experts is like a shared expert
    model_tensors = [t._replace(part="shared") if t.part == "mlp" and t.layer in mixed else t for t in model_tensors]
    parts = _parts(model_tensors)
    layers = _layers(model_tensors, of.num_hidden_layers)
    sparse, kinds = [layer["routed"] > 0 for layer in layers], _hybrid_kinds(of)
    with_attention = [kind not in STATEFUL and layer["attention"] > 0 for kind, layer in zip(kinds, layers, strict=True)]
    first_attention = layers[with_attention.index(True)]
    sparse_layer = layers[sparse.index(True)] if any(sparse) else Counter()
    mlps, mixtures, hybrid = sum(layer["mlp"] > 0 for layer in layers), sum(sparse), any(kind in STATEFUL for kind in kinds)
    latent, heads = hasattr(of, "kv_lora_rank"), of.num_attention_heads
    widths = [t.shape[0] for t in model_tensors if t.part == "mlp" and t.name.endswith(".up_proj.weight")]
    of_layers = decoder.layer_configs(of)
    kv_heads = getattr(of_layers[0], "num_key_value_heads", None) or heads
    sizes = [getattr(layer, "head_dim", None) or of.hidden_size // heads for layer in of_layers]
    head_dim = _mean([size for size, attends in zip(sizes, with_attention, strict=True) if attends])
    gated = any("gate_" in tensor.name or ".w3." in tensor.name for tensor in model_tensors)
    experts = (getattr(of, name, 0) for name in ("n_routed_experts", "num_local_experts", "num_experts"))
    windows = decoder.windows(of)
    caches = () if latent else tuple(_caches(of, windows, with_attention, kv_heads, sizes))
    cached = sum(cache.heads * cache.head_dim for cache in caches)
    sliding = sum(cache.heads * cache.head_dim for cache in caches if cache.slides)
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
        kv_width=of.kv_lora_rank + of.qk_rope_head_dim if latent else 2 * cached / sum(with_attention),
        caches=caches,
        dense_width=_mean(widths) if widths else of.intermediate_size if mlps else 0,
        mlp_layers=mlps,
        experts=next(filter(None, experts)) if mixtures else 0,
        experts_per_token=(getattr(of, "top_k_experts", None) or of.num_experts_per_tok) if mixtures else 0,
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
        other=parts["norm"] + parts["router"] + parts["layer inputs"],
        layer_inputs=parts["layer inputs"],
        output=parts["output"],
        largest_layer=max(layer.total() for layer in layers),
        attention_layer=round(parts["attention"] / len(layers)),
        norms_layer=first_attention["norm"],
        mlp_layer=round(parts["mlp"] / max(1, len(layers) - mixtures)),
        sparse_layer=sum(sparse_layer[part] for part in ("shared", "routed", "router")),
        window=windows["window_size"][0] + 1 if windows else 0,
        window_share=sliding / cached if cached else 0.0,
        state=_state(of) if hybrid else None,
        tensors=tuple(model_tensors),
    )


def _mean(sizes: Sequence[int]) -> float:
    mean = sum(sizes) / len(sizes)
    return int(mean) if mean.is_integer() else mean


def _caches(
    of: Any, windows: Mapping[str, Any], with_attention: Sequence[bool], kv_heads: int, sizes: Sequence[int]
) -> Iterator[Cache]:
    """Yield the cache of each layer that has one. Gemma 4's last num_kv_shared_layers layers read those of earlier layers."""
    slides = windows.get("window_attn_skip_freq") or [0] * len(sizes)
    own = len(sizes) - (getattr(of, "num_kv_shared_layers", None) or 0)
    for i, layer in enumerate(decoder.layer_configs(of)[:own]):
        if with_attention[i]:
            yield Cache(getattr(layer, "num_key_value_heads", None) or kv_heads, sizes[i], bool(slides[i]))


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
