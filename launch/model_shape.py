"""Sizes and parameter counts of a model, from its config.json, without torch.

The counts equal those of transformers' modules, biases included, for every family that `pipeline.models.tensors` describes: all
that the Megatron backend trains, and others that FSDP2 trains.
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
    """A model of a family whose sizes config.json alone does not give. It may train all the same."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a language model. A critic or a reward model has a value head of `hidden` parameters in place of `output`."""

    family: str  # model_type
    layers: int
    dense_layers: int  # of these, with an MLP
    sparse_layers: int  # with a mixture of experts
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values
    kv_width: int  # numbers that generation caches for each token and layer
    dense_width: int  # intermediate size of the layers with an MLP; 0 if there are none
    experts: int  # in each of the other layers; 0 if there are none
    experts_per_token: int
    expert_width: int
    shared_width: int  # of the experts that every token passes, together
    tied: bool  # the output layer is the embedding
    # Parameters of the whole model, by part
    embedding: int  # with the output layer, if that is not tied
    attention: int
    mlp: int  # with shared experts
    routed: int  # the experts that a router chooses among
    other: int  # norms and routers
    # Of these
    output: int  # the output layer's; 0 if it is tied
    # Parameters of one layer
    largest_layer: int  # all that the largest one has
    attention_layer: int
    mlp_layer: int  # of a layer with an MLP; 0 if there are none
    sparse_layer: int  # a mixture, with router and shared experts; 0 if there are none

    @property
    def parameters(self) -> int:
        return self.embedding + self.attention + self.mlp + self.routed + self.other

    @property
    def active(self) -> int:
        """Return the number of parameters that a token is multiplied with.

        Of the routed experts only the chosen ones count, and of the embedding only the output layer: the table is looked up.
        """
        chosen = self.routed * self.experts_per_token // self.experts if self.experts else 0
        return self.vocabulary * self.hidden + self.attention + self.mlp + chosen + self.other

    @property
    def latent(self) -> bool:
        """Return whether attention caches a latent that all heads share, as DeepSeek's does."""
        return self.family == "deepseek_v3"

    @property
    def norms_layer(self) -> int:
        """Return the parameters of the norms of a layer."""
        return self.largest_layer - self.attention_layer - max(self.sparse_layer, self.mlp_layer)

    @property
    def routed_layer(self) -> int:
        """Return the parameters of the routed experts of a layer that is a mixture."""
        return self.routed // max(1, self.sparse_layers)

    @property
    def shared_layer(self) -> int:
        """Return the parameters of the shared experts of a layer that is a mixture."""
        return 3 * self.hidden * self.shared_width

    @property
    def router_layer(self) -> int:
        """Return the parameters of the router of a layer that is a mixture."""
        return self.sparse_layer - self.shared_layer - self.routed_layer

    @classmethod
    def of(cls, config: Mapping[str, Any], key: str = "policy.model_name") -> ModelShape:
        """Return the shape of the model with this config.json. `key` names the model in the recipe.

        Raises UnknownShape for a family that is not in `pipeline.models.sizes.MODEL_TYPES`, and RecipeError for a missing key.
        """
        try:
            return _shape(sizes.sizes(config), tensors(config))
        except KeyError as error:
            told = f"config.json of this {config['model_type']} has no {error}. Try to fetch the model again"
            raise RecipeError(Problem(key, "missing-value", told)) from None
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
    """Return the number of parameters of each part."""
    counts: Counter[str] = Counter()
    for tensor in found:
        if tensor.part != "buffer":
            counts[tensor.part] += tensor.numel
    return counts
