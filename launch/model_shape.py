"""Compute a model's sizes and parameter counts from its config.json, without torch.

The counts equal those of transformers' modules, biases included, for every family that `pipeline.models.tensors` describes:
all families of the Megatron backend, and some that only FSDP2 trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pipeline.config import Problem, RecipeError
from pipeline.models import sizes
from pipeline.models.tensors import Tensor, experts, tensors


class UnknownShape(RecipeError):
    """The sizes of a model of this family are not known from config.json alone. FSDP2 may train it all the same."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a language model. A critic or a reward model has a value head of `hidden` parameters in place of `output`."""

    family: str  # model_type
    layers: int
    dense_layers: int  # layers with an MLP
    sparse_layers: int  # layers with a mixture of experts
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int  # size of a query and a key
    value_dim: int  # size of a value
    kv_width: int  # values that generation caches per token and layer
    dense_width: int  # intermediate size of the layers with an MLP; 0 if there are none
    experts: int  # routed experts of each sparse layer; 0 if there are none
    experts_per_token: int
    expert_width: int
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
    attention_layer: int
    mlp_layer: int  # the MLP of a dense layer; 0 if there are none
    sparse_layer: int  # the mixture of a sparse layer, with router and shared experts; 0 if there are none

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.embedding + self.attention + self.mlp + self.routed + self.other

    @property
    def active(self) -> int:
        """Number of parameters in the matrix products of one token.

        Only the chosen routed experts count, and only the output layer of the embedding, because the input is a table lookup.
        """
        chosen = self.routed * self.experts_per_token // self.experts if self.experts else 0
        return self.vocabulary * self.hidden + self.attention + self.mlp + chosen + self.other

    @property
    def latent(self) -> bool:
        """Return whether attention caches a latent that all heads share (MLA), as DeepSeek's does."""
        return self.family == "deepseek_v3"

    @property
    def norms_layer(self) -> int:
        """Number of parameters of one layer's norms."""
        return self.largest_layer - self.attention_layer - max(self.sparse_layer, self.mlp_layer)

    @property
    def routed_layer(self) -> int:
        """Number of parameters of one sparse layer's routed experts."""
        return self.routed // max(1, self.sparse_layers)

    @property
    def shared_layer(self) -> int:
        """Number of parameters of one sparse layer's shared experts."""
        return 3 * self.hidden * self.shared_width

    @property
    def router_layer(self) -> int:
        """Number of parameters of one sparse layer's router."""
        return self.sparse_layer - self.shared_layer - self.routed_layer

    @classmethod
    def of(cls, config: Mapping[str, Any], key: str = "policy.model_name") -> ModelShape:
        """Return the shape of the model with this config.json. key: the recipe's key of the model's name.

        Raises UnknownShape for a family that is not in `pipeline.models.sizes.MODEL_TYPES`, and RecipeError for a missing key.
        """
        try:
            return _shape(sizes.sizes(config), tensors(config))
        except KeyError as error:
            why = f"config.json of this {config['model_type']} has no {error}. Try to download the model again"
            raise RecipeError(Problem(key, "missing-value", why)) from None
        except ValueError as error:
            raise UnknownShape(Problem(key, "unsupported", str(error))) from None


def _shape(of: SimpleNamespace, found: list[Tensor]) -> ModelShape:
    sparse = sizes.sparse_layers(of)
    mixtures, parts = sum(sparse), _parts(found)
    first = {kind: _parts([t for t in found if t.layer == sparse.index(kind)]) for kind in set(sparse)}
    dense_layer, sparse_layer = first.get(False, Counter()), first.get(True, Counter())
    latent = of.model_type == "deepseek_v3"
    expert_width = getattr(of, "moe_intermediate_size", of.intermediate_size) if mixtures else 0
    return ModelShape(
        family=of.model_type,
        layers=of.num_hidden_layers,
        dense_layers=of.num_hidden_layers - mixtures,
        sparse_layers=mixtures,
        hidden=of.hidden_size,
        vocabulary=of.vocab_size,
        heads=of.num_attention_heads,
        kv_heads=of.num_key_value_heads,
        head_dim=of.qk_nope_head_dim + of.qk_rope_head_dim if latent else of.head_dim,
        value_dim=of.v_head_dim if latent else of.head_dim,
        kv_width=of.kv_lora_rank + of.qk_rope_head_dim if latent else 2 * of.num_key_value_heads * of.head_dim,
        dense_width=0 if all(sparse) else of.intermediate_size,
        experts=experts(of) if mixtures else 0,
        experts_per_token=of.num_experts_per_tok if mixtures else 0,
        expert_width=expert_width,
        shared_width=expert_width * (getattr(of, "n_shared_experts", None) or 0),
        tied=of.tie_word_embeddings,
        embedding=parts["embedding"] + parts["output"],
        attention=parts["attention"],
        mlp=parts["mlp"] + parts["shared"],
        routed=parts["routed"],
        other=parts["norm"] + parts["router"],
        output=parts["output"],
        largest_layer=max(layer.total() for layer in first.values()),
        attention_layer=next(iter(first.values()))["attention"],
        mlp_layer=dense_layer["mlp"],
        sparse_layer=sum(sparse_layer[part] for part in ("shared", "routed", "router")),
    )


def _parts(found: list[Tensor]) -> Counter[str]:
    """Return the number of parameters of each part, without buffers."""
    counts: Counter[str] = Counter()
    for tensor in found:
        if tensor.part != "buffer":
            counts[tensor.part] += tensor.numel
    return counts
