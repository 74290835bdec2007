"""The sizes of a model by its config.json, and how many parameters it has, without torch.

Knows the families that the Megatron backend has. The counts are those of transformers' modules, to the last bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config import RecipeError


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    dense_width: int  # intermediate size of the layers with an MLP; 0 if there are none
    experts: int  # in each of the other layers; 0 if there are none
    expert_width: int
    shared_width: int  # of the experts that every token passes, together
    # Parameters of the whole model, by part
    embedding: int  # with the output layer, if that is not tied
    attention: int
    mlp: int  # with shared experts
    routed: int  # the experts that a router chooses among
    other: int  # norms and routers
    largest_layer: int  # of the whole, what the largest layer has

    @property
    def parameters(self) -> int:
        return self.embedding + self.attention + self.mlp + self.routed + self.other

    @classmethod
    def of(cls, config: dict[str, Any], key: str = "policy.model_name") -> ModelShape:
        """`config`: config.json of one of MEGATRON_MODEL_TYPES. Raises RecipeError for a key that it lacks, and says which
        `key` of the recipe names the model."""
        try:
            return _shape(config)
        except KeyError as error:
            raise RecipeError(
                f"{key}: config.json of this {config['model_type']} has no {error}; fetch the model again"
            ) from None


def _shape(config: dict[str, Any]) -> ModelShape:
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    experts, expert_width, shared_width, dense_layers = _mixture(config)
    sparse_layers = layers - dense_layers
    attention, norms = _attention(config)
    norms += 2 * hidden
    mlp = 3 * hidden * config["intermediate_size"]
    if config.get("mlp_bias"):
        mlp += 2 * config["intermediate_size"] + hidden
    shared, routed, router = 3 * hidden * shared_width, 3 * hidden * expert_width * experts, hidden * experts
    return ModelShape(
        layers=layers,
        dense_width=config["intermediate_size"] if dense_layers else 0,
        experts=experts,
        expert_width=expert_width,
        shared_width=shared_width,
        embedding=config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings", False) else 2),
        attention=layers * attention,
        mlp=dense_layers * mlp + sparse_layers * shared,
        routed=sparse_layers * routed,
        other=layers * norms + sparse_layers * router + hidden,
        largest_layer=attention + norms + max(mlp if dense_layers else 0, shared + routed + router if sparse_layers else 0),
    )


def _mixture(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """(experts per layer, their intermediate size, that of the shared ones together, how many layers have none)"""
    layers = config["num_hidden_layers"]
    match config["model_type"]:
        case "mixtral":
            return config["num_local_experts"], config["intermediate_size"], 0, 0
        case "qwen3_moe":
            step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
            sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
            return _experts(config, "num_experts"), config["moe_intermediate_size"], 0, layers - len(sparse)
        case "deepseek_v3":
            width = config["moe_intermediate_size"]
            dense_layers = min(config["first_k_dense_replace"], layers)
            return _experts(config, "n_routed_experts"), width, width * (config.get("n_shared_experts") or 0), dense_layers
    return 0, 0, 0, layers


def _experts(config: dict[str, Any], name: str) -> int:
    """transformers 5 writes some families' number of experts under its common name."""
    return config["num_local_experts"] if name not in config and "num_local_experts" in config else config[name]


def _attention(config: dict[str, Any]) -> tuple[int, int]:
    """Parameters of one layer's (projections, norms inside the attention)."""
    hidden, heads, family = config["hidden_size"], config["num_attention_heads"], config["model_type"]
    bias = bool(config.get("attention_bias"))
    if family == "deepseek_v3":
        return _latent_attention(config, hidden, heads, bias)
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    projections = 2 * hidden * (queries + keys)
    if bias or family == "qwen2":
        projections += queries + 2 * keys + (hidden if family != "qwen2" else 0)
    return projections, 2 * head if family in ("qwen3", "qwen3_moe") else 0


def _latent_attention(config: dict[str, Any], hidden: int, heads: int, bias: bool) -> tuple[int, int]:
    query_rank, rank = config["q_lora_rank"], config["kv_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    query = heads * (nope + rope)
    projections = hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    projections += hidden * query if query_rank is None else hidden * query_rank + query_rank * query
    if bias:
        projections += rank + rope + hidden + (query_rank or 0)
    return projections, rank + (query_rank or 0)
