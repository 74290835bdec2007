"""Count the floating-point operations of a model from its shape. A multiply-add counts as two.

A token uses every active parameter once: 2 operations each. Attention takes, for each earlier token, 2 x heads x (head
dimension of keys + of values) operations; with equal dimensions that is the usual 4 x heads x dimension. A backward pass takes
twice the operations of a forward pass (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Full recomputation adds one more
forward pass. State spaces and delta nets take, for each token, the products of its chunk and of its state (arXiv 2405.21060,
section 6; 2412.06464, section 3.3).

Not counted: norms, softmax, rotary embeddings, routers' top-k; sliding windows, which would need less; what LoRA saves.
"""

from __future__ import annotations

from pipeline.config import PolicyConfig, uses_megatron
from pipeline.models.shape import ModelShape


def forward(shape: ModelShape, tokens: float, pairs: float) -> float:
    """Return the operations of a forward pass over `tokens` tokens.

    pairs: the number of (query, key) pairs of all sequences; a sequence has half its squared length.
    """
    mixers = shape.state_layers * shape.state.operations if shape.state else 0
    return (2 * shape.active + mixers) * tokens + attention(shape, pairs)


def attention(shape: ModelShape, pairs: float) -> float:
    """Return the operations of attention for `pairs` (query, key) pairs, in all layers."""
    return 2 * shape.attention_layers * shape.heads * (shape.head_dim + shape.value_dim) * pairs


def decode_attention(shape: ModelShape, pairs: float) -> float:
    """Return the operations of attention on the KV cache. Latent attention works on the latent, which all heads share."""
    if not shape.latent:
        return attention(shape, pairs)
    return 4 * shape.attention_layers * shape.heads * shape.kv_width * pairs


def recomputed_share(policy: PolicyConfig, shape: ModelShape, stages: int, attention_share: float) -> float:
    """Return the share of the forward pass that the backward pass recomputes.

    stages: pipeline-parallel size. attention_share: attention's share of the forward pass.
    """
    if not uses_megatron(policy):
        dtensor = policy.dtensor_cfg  # selective recomputation repeats no matrix product
        return float(dtensor.activation_checkpointing is True and dtensor.recompute_granularity == "full")
    megatron = policy.megatron_cfg
    if not megatron.activation_checkpointing:
        return 0.0
    if megatron.recompute_granularity == "selective":
        return attention_share
    if megatron.recompute_method == "block":  # recompute_num_layers in each stage
        return min(1.0, (megatron.recompute_num_layers or 1) * stages / shape.layers)
    return 1.0
