"""What the head works in: logits of a chunk of rows, their softmax, its gradient, as `pipeline.train.logprobs` has them.

With n rows at once and v entries of the vocabulary on this rank, in bytes: the forward pass has the logits in float32 and,
inside logsumexp, as much again, 8 n v. A batch of one chunk keeps its softmax, 4 n v, and works in one more of them. With
several chunks the backward pass has, when a chunk begins, the last one's softmax and gradient beside the new logits before and
after their cast: 12 n v in either precision; and the gradient of the head's weight in float32. The most likely tokens are found
by 64-bit keys: 20 n v.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.memory_load import Model


@dataclass(frozen=True, slots=True)
class Head:
    """Bytes."""

    saved: float  # from the forward pass to the backward pass
    forward: float  # at most at once, without a graph too
    backward: float  # besides what is saved
    gradient: float  # of the head's weight, in the compute precision


def head(model: Model, tokens: float, tensor: int) -> Head:
    """tokens: of a microbatch on this rank."""
    c, hidden = model.size, model.shape.hidden
    if model.values:
        cast = 4 * tokens * hidden if c < 4 else 0.0
        return Head(cast, cast, 4 * tokens * hidden + c * tokens * hidden, c * hidden)
    vocabulary = -(-model.shape.vocabulary // tensor)
    rows = min(tokens, model.policy.logprob_chunk_size or tokens)
    logits, weight = rows * vocabulary, vocabulary * hidden
    forward = (20 if model.top_k else 8) * logits
    of_hidden = c * tokens * hidden
    if rows < tokens:
        backward = of_hidden + 4 * weight + max(12 * logits, c * weight + (4 + c) * logits)
        return Head(0.0, forward, backward, c * weight)
    half = c if c < 4 else 0
    work = max(4 + half, 8 if model.entropy else 4) * logits
    return Head(4 * logits, forward, of_hidden + max(work, c * (logits + weight)), c * weight)
