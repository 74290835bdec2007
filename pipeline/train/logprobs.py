"""Token log-probs from hidden states, a chunk of tokens at a time and with the vocabulary cut over tensor-parallel ranks.

Logits of [T, vocabulary] in float32 are the largest tensor of a training step, so at most `chunk` rows of them exist at once:
the backward pass computes them again. A batch of one chunk keeps its softmax instead.

    log p(y) = z_y - log sum_v exp(z_v),   z = h W^T / temperature
    d log p(y) / d z_v = [v = y] - p(v)

Entropy and top-k or top-p truncated distributions are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The rows [start, start + size) of the head that this rank holds; the others are with the rest of `group`."""

    start: int
    group: dist.ProcessGroup


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """log p(tokens[t] | before) as [T] float32, 0 where a sequence begins.

    hidden [T, H]; weight [V, H], or this rank's rows of it; tokens, positions [T] int64. chunk None: all tokens at once.
    """
    # Row t predicts token t + 1. Rows at the end of a sequence predict the next one's first token, which is masked below:
    # computing those few for nothing is cheaper than gathering the others.
    predicted = target_logprobs(hidden, weight, tokens.roll(-1), temperature, chunk, shard)
    return predicted.roll(1).masked_fill(positions == 0, 0.0)


def target_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """log p(targets[t]) by the distribution that row t of hidden [T, H] predicts, as [T] float32. Else as `token_logprobs`."""
    return _Logprobs.apply(hidden, weight, targets, temperature, chunk or len(targets), shard)


class _Logprobs(torch.autograd.Function):
    """hidden [T, H], weight [V, H], targets [T] -> log p(targets) [T] float32."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, shard):
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        normalizer = torch.empty_like(logprobs)  # log sum exp
        softmax = None
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperature)
            logprobs[rows], normalizer[rows] = _pick_and_normalize(logits, targets[rows], shard)
            if len(hidden) <= chunk and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
                softmax = logits.sub_(normalizer[rows, None]).exp_()
        ctx.save_for_backward(hidden, weight, targets, normalizer, softmax)
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, normalizer, softmax = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        several = len(hidden) > ctx.chunk
        # In half precision, chunks must not be rounded between two additions.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if several else None
        for rows in _chunks(len(hidden), ctx.chunk):
            if several:
                probabilities = _logits(hidden[rows], weight, ctx.temperature).sub_(normalizer[rows, None]).exp_()
            else:
                probabilities = softmax
            # Not in place: the graph may be run backward twice.
            grad_logits = probabilities * -grad[rows, None]
            local, here = _local_targets(targets[rows], len(weight), ctx.shard)
            grad_logits.scatter_add_(1, local[:, None], torch.where(here, grad[rows], 0.0)[:, None])
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if several:
                grad_weight += grad_logits.T @ hidden[rows]
            else:
                grad_weight = grad_logits.T @ hidden
        if ctx.shard is not None:  # each rank has seen its part of the vocabulary
            dist.all_reduce(grad_hidden, group=ctx.shard.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """[rows, V] float32. The product is in the model's own precision, as engines compute it."""
    logits = (hidden @ weight.T).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _pick_and_normalize(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs of the targets, log sum exp), both [rows] float32."""
    local, here = _local_targets(targets, logits.size(1), shard)
    picked = logits.gather(1, local[:, None])[:, 0]
    normalizer = logits.logsumexp(1)
    if shard is not None:
        highest = normalizer.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
        both = torch.stack([torch.where(here, picked, 0.0), (normalizer - highest).exp()])
        dist.all_reduce(both, group=shard.group)
        picked, normalizer = both[0], highest + both[1].log()
    return picked - normalizer, normalizer


def _local_targets(targets: torch.Tensor, rows: int, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices into this rank's rows of the head, which targets those are meant for); the others point at a valid row."""
    local = targets - (shard.start if shard else 0)
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)
