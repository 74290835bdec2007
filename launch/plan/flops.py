"""Count the floating-point operations of a model from its shape. A multiply-add counts as two.

A token uses every active parameter once: 2 operations each. Attention takes, for each earlier token, 2 x heads x (head
dimension of keys + of values) operations; with equal dimensions that is the usual 4 x heads x dimension. A backward pass takes
twice the operations of a forward pass (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Full recomputation adds one more
forward pass. A state space takes, for each token, the products of its chunk and of its state (arXiv 2405.21060, section 6).

Not counted: norms, softmax, rotary embeddings, routers' top-k; sliding windows, which would need less; what LoRA saves.
"""

from __future__ import annotations

from launch.model_shape import ModelShape
from pipeline.models.mixers import StateSpace


def forward(shape: ModelShape, tokens: float, pairs: float) -> float:
    """Return the operations of `tokens` tokens with `pairs` (query, key) pairs in all: half a sequence's squared length."""
    return (2 * shape.active + shape.state_layers * _scan(shape.state)) * tokens + attention(shape, pairs)


def _scan(state: StateSpace | None) -> float:
    """Return the operations of a state space for a token: scores and outputs in its chunk, reading and writing its state."""
    if state is None:
        return 0.0
    inside = state.chunk * (state.groups * state.state + state.width)
    return 2 * inside + 4 * state.width * state.state


def attention(shape: ModelShape, pairs: float) -> float:
    """Return the operations of attention for `pairs` (query, key) pairs, in all layers."""
    return 2 * shape.attention_layers * shape.heads * (shape.head_dim + shape.value_dim) * pairs


def decode_attention(shape: ModelShape, pairs: float) -> float:
    """Return the operations of attention on the KV cache: latent attention works on the latent, which all heads share."""
    if not shape.latent:
        return attention(shape, pairs)
    return 4 * shape.attention_layers * shape.heads * shape.kv_width * pairs
