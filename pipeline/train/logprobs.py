"""What a head says of each token, from hidden states, a chunk of rows at a time and with the vocabulary cut over ranks.

Logits of [T, vocabulary] in float32 are the largest tensor of a training step, so at most `chunk` rows of them exist at once:
the backward pass computes them again. A batch of one chunk keeps its softmax instead.

    log p(y) = z_y - log sum_v exp(z_v),      z = h W^T / temperature
    d log p(y) / d z_v = [v = y] - p(v)
    H = - sum_v p(v) log p(v)
    d H / d z_v = - p(v) (log p(v) + H)

Top-p and top-k truncated distributions are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.types import Outputs, TopK


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The rows [start, start + size) of the head that this rank holds; the others are with the rest of `group`."""

    start: int
    group: dist.ProcessGroup


def packed_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
    entropy: bool = False,
    candidates: torch.Tensor | None = None,
    top_k: int = 0,
) -> Outputs:
    """Of packed tokens: entry t is of the distribution that token t was drawn from, and 0 where a sequence begins.

    hidden [T, H]; weight [V, H], or this rank's rows of it; tokens, positions [T] int64. chunk None: all rows at once.
    candidates [T, K] int64: `Outputs.top_k` has their log-probs. top_k, in place of them: it has the K most likely tokens, and
    there is no graph behind those.
    """
    # Row t predicts token t + 1. Rows at the end of a sequence predict the next one's first token, which is masked below:
    # computing those few for nothing is cheaper than gathering the others.
    first = positions == 0
    following = None if candidates is None else candidates.roll(-1, 0)
    logprobs, uncertainty, chosen = target_outputs(
        hidden, weight, tokens.roll(-1), temperature, chunk, shard, entropy, following
    )
    if top_k:
        likely, chosen = most_likely(hidden, weight, top_k, temperature, chunk, shard)
        candidates = likely.roll(1, 0).masked_fill(first[:, None], 0)
    return Outputs(
        logprobs=logprobs.roll(1).masked_fill(first, 0.0),
        entropy=None if uncertainty is None else uncertainty.roll(1).masked_fill(first, 0.0),
        top_k=None if chosen is None else TopK(candidates, chosen.roll(1, 0).masked_fill(first[:, None], 0.0)),
    )


def target_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
    entropy: bool = False,
    candidates: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Of the distributions that the rows of hidden [T, H] predict, all float32 and with a graph: the log-probs of targets [T],
    as [T]; the entropy, as [T], if `entropy`; the log-probs of candidates [T, K] int64, as [T, K], if there are any.
    """
    return _Head.apply(hidden, weight, targets, temperature, chunk or len(targets), shard, entropy, candidates)


@torch.no_grad()
def most_likely(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [T, k] int64, their log-probs [T, k] float32) of each row of hidden [T, H], the most likely first and, of equally
    likely ones, the lowest. Raises ValueError for a `k` above the vocabulary's size.
    """
    vocabulary = torch.tensor(len(weight), device=hidden.device)
    if shard is not None:
        dist.all_reduce(vocabulary, group=shard.group)
    if not 0 < k <= vocabulary:
        raise ValueError(f"the {k} most likely tokens were asked for, of a vocabulary of {int(vocabulary)}")
    tokens = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), k, dtype=torch.float32, device=hidden.device)
    for rows in _chunks(len(hidden), chunk or len(hidden)):
        logits = _logits(hidden[rows], weight, temperature)
        normalizer, _ = _normalize(logits, logits.new_empty(len(logits), 0), shard)
        keys = _top(_sortable(logits, shard.start if shard else 0), k, shard)
        tokens[rows], values = _from_sortable(keys)
        logprobs[rows] = values - normalizer[:, None]
    return tokens, logprobs


class _Head(torch.autograd.Function):
    """hidden [T, H], weight [V, H], targets [T], candidates [T, K] -> log p [T], H [T] or None, log p [T, K] or None."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, shard, with_entropy, candidates):
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        ctx.set_materialize_grads(False)  # what a loss does not use costs nothing
        wanted = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], 1)  # [T, 1 + K]
        logprobs = torch.empty(wanted.shape, dtype=torch.float32, device=hidden.device)
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)  # log sum exp
        entropy = torch.empty_like(normalizer) if with_entropy else None
        softmax = None
        keeps = len(hidden) <= chunk and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperature)
            local, here = _local_targets(wanted[rows], len(weight), shard)
            picked = logits.gather(1, local)
            normalizer[rows], picked = _normalize(logits, picked if here is None else picked.where(here, 0.0), shard)
            logprobs[rows] = picked - normalizer[rows, None]
            if keeps or with_entropy:
                probabilities = logits.sub_(normalizer[rows, None]).exp_()
            if keeps:
                softmax = probabilities
            if with_entropy:
                entropy[rows] = _summed(torch.special.entr(probabilities).sum(1), shard)  # of p: -p log p, 0 at 0
        ctx.save_for_backward(hidden, weight, wanted, normalizer, entropy, softmax)
        return logprobs[:, 0], entropy, None if candidates is None else logprobs[:, 1:]

    @staticmethod
    def backward(ctx, of_targets, of_entropy, of_candidates):
        hidden, weight, wanted, normalizer, entropy, softmax = ctx.saved_tensors
        of_wanted = _joined(of_targets, of_candidates, wanted)
        # By the probability itself: d log p / d z and d H / d z have it in common.
        of_softmax = -of_wanted.sum(1)
        if of_entropy is not None:
            of_softmax = of_softmax - of_entropy * entropy
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
            grad_logits = probabilities * (of_softmax[rows, None] / ctx.temperature)
            if of_entropy is not None:
                grad_logits.addcmul_(torch.special.entr(probabilities), of_entropy[rows, None] / ctx.temperature)
            local, here = _local_targets(wanted[rows], len(weight), ctx.shard)
            of_local = of_wanted[rows] / ctx.temperature
            grad_logits.scatter_add_(1, local, of_local if here is None else of_local.where(here, 0.0))
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if several:
                grad_weight += grad_logits.T @ hidden[rows]
            else:
                grad_weight = grad_logits.T @ hidden
        _summed(grad_hidden, ctx.shard)  # each rank has seen its part of the vocabulary
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _joined(of_targets: torch.Tensor | None, of_candidates: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """Gradients of the wanted tokens' log-probs as [T, 1 + K] float32; of what the loss did not use, 0."""
    joined = torch.zeros(wanted.shape, dtype=torch.float32, device=wanted.device)
    if of_targets is not None:
        joined[:, 0] = of_targets
    if of_candidates is not None:
        joined[:, 1:] = of_candidates
    return joined


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """[rows, V] float32. The product is in the model's own precision, as engines compute it."""
    logits = (hidden @ weight.T).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _summed(partial: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    """Over the parts of the vocabulary, in place."""
    if shard is not None:
        dist.all_reduce(partial, group=shard.group)
    return partial


def _normalize(logits: torch.Tensor, picked: torch.Tensor, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(log sum exp [rows], picked [rows, K]) over the whole vocabulary, of this rank's part of both."""
    normalizer = logits.logsumexp(1)
    if shard is None:
        return normalizer, picked
    highest = normalizer.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
    both = _summed(torch.cat([picked, (normalizer - highest).exp()[:, None]], 1), shard)
    return highest + both[:, -1].log(), both[:, :-1]


def _local_targets(targets: torch.Tensor, rows: int, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(indices into this rank's rows of the head, which targets those are meant for, None if all); others point at any row."""
    if shard is None:
        return targets, None
    local = targets - shard.start
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


# ---- the most likely tokens -------------------------------------------------------------------------------------------------

# torch.topk takes any of equal entries, and in half precision many logits are equal. So what is sorted are int64 keys: in the
# upper half the logit's bits, flipped such that integers sort as floats do; in the lower half the token, lower ones first.
_LAST = (1 << 32) - 1


def _sortable(logits: torch.Tensor, start: int) -> torch.Tensor:
    """Keys [rows, V] of logits [rows, V] float32 of the tokens from `start` on."""
    keys = _flipped((logits + 0.0).view(torch.int32)).long() << 32  # + 0.0: of -0.0 and 0.0, neither is larger
    return keys.add_(_LAST - start - torch.arange(logits.size(1), device=logits.device))


def _from_sortable(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, logits)"""
    return _LAST - (keys & _LAST), _flipped((keys >> 32).int()).view(torch.float32)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Its own inverse: all bits but the sign's, of what is negative."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _top(keys: torch.Tensor, k: int, shard: VocabularyShard | None) -> torch.Tensor:
    """The k highest of each row [rows, k], over the whole vocabulary, in falling order."""
    if shard is None:
        return keys.topk(k, 1).values
    ours = keys.new_full((len(keys), k), torch.iinfo(torch.int64).min)  # a rank may have fewer tokens than k
    fewer = min(k, keys.size(1))
    ours[:, :fewer] = keys.topk(fewer, 1).values
    theirs = [torch.empty_like(ours) for _ in range(shard.group.size())]
    dist.all_gather(theirs, ours, group=shard.group)
    return torch.cat(theirs, 1).topk(k, 1).values
