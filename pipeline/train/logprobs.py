"""Log-probs and entropy of each token from hidden states, in chunks of rows and with the vocabulary cut over ranks.

Logits [T, vocabulary] in float32 are the largest tensor of a training step, so at most `chunk` rows of them exist at once. The
backward pass recomputes them. A batch of one chunk keeps its softmax instead.

    log p(y) = z_y - log sum_v exp(z_v),      z = f(h W^T) / temperature
    d log p(y) / d z_v = [v = y] - p(v)
    H = - sum_v p(v) log p(v)
    d H / d z_v = - p(v) (log p(v) + H)

f is the identity, a scale, a soft cap, or both (`HeadFunction`).

With truncated sampling, log-probs must be of the distribution from which tokens were sampled: p(v) = 0 and log p(v) = -inf for
truncated tokens. So the engine's filters are applied to the logits here, in the order of vLLM and NeMo-RL
(nemo_rl/algorithms/logits_sampling_utils.py): temperature, then the k largest logits, then the smallest set of the most likely
of these whose probabilities sum to p. The set of truncated tokens is constant: they have no gradient, and neither has the
log-prob of a truncated target. Both filters keep all logits that are not below a floor, so one number per row defines them. The
floor is found by bisection over all float32 numbers: each of the 32 passes needs one sum per row over the ranks that share the
vocabulary; nothing is sorted or gathered. All logits that equal the floor are kept. vLLM keeps some of them, depending on its
kernel, so no token that vLLM sampled is truncated here. At least one token is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipeline.config import GenerationConfig

_INFINITY = 0x7F800000  # the bits of float32 infinity


@dataclass(frozen=True, slots=True)
class Truncation:
    """The filters of a policy's sampling."""

    top_k: int | None  # None: no limit
    top_p: float

    @classmethod
    def of(cls, generation: GenerationConfig) -> Truncation | None:
        """Return the filters; None if tokens are sampled from the whole distribution."""
        if generation.top_k is None and generation.top_p == 1.0:
            return None
        return cls(generation.top_k, generation.top_p)

    def floor(self, logits: torch.Tensor, normalizer: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the smallest kept logit of each row, [rows] float32; -inf if all are kept.

        logits [rows, V] float32: this rank's part of the vocabulary; normalizer [rows]: log sum exp over the whole vocabulary.
        """

        def total(values: torch.Tensor) -> torch.Tensor:
            summed = values.sum(1)
            if group is not None:
                dist.all_reduce(summed, group=group)
            return summed

        floor = torch.full_like(normalizer, -torch.inf)
        if (top_k := self.top_k) is not None:
            floor = _largest(lambda least: total(logits >= least[:, None]) >= top_k, floor)
        if self.top_p < 1.0:
            probabilities = (logits - normalizer[:, None]).exp_()

            def mass(least: torch.Tensor) -> torch.Tensor:
                return total(torch.where(logits >= least[:, None], probabilities, 0.0))

            enough = self.top_p * mass(floor)
            floor = _largest(lambda least: mass(least) >= enough, floor)
        return floor


def _largest(holds: Callable[[torch.Tensor], torch.Tensor], smallest: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the largest float32 for which `holds` is true; `smallest` [rows] if there is none above it.

    holds: a function [rows] -> [rows] bool. In each row it is true up to some number, and false above it and for infinity.
    """
    below, above = float_order(smallest).long(), torch.full_like(smallest, _INFINITY, dtype=torch.int64)
    for _ in range(32):
        middle = (below + above) >> 1
        true = holds(from_float_order(middle.int()))
        below, above = torch.where(true, middle, below), torch.where(true, above, middle)
    return from_float_order(below.int())


def float_order(values: torch.Tensor) -> torch.Tensor:
    """Map float32 `values` to int32 that sort in the same order; -0.0 comes right before 0.0."""
    return _flip(values.view(torch.int32))


def from_float_order(keys: torch.Tensor) -> torch.Tensor:
    """Map int32 keys of `float_order` back to their float32 values."""
    return _flip(keys).view(torch.float32)


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """Flip all bits except the sign of negative numbers. This is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's rows of the head, which begin at row `start`. The other ranks of `group` hold the other rows."""

    start: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class HeadFunction:
    """The function that a head applies to x = h W^T: y = x * scale, then softcap * tanh(y / softcap) unless softcap is None."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, products: torch.Tensor) -> torch.Tensor:
        """Apply the function to x in place, and return the result."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)
        return products

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return the function's derivative at x, given the values that `apply_` returned for x."""
        if self.softcap is None:
            return self.scale
        return (logits / self.softcap).square_().neg_().add_(1.0).mul_(self.scale)


LINEAR = HeadFunction()


class TargetOutputs(NamedTuple):
    """Outputs of the distributions that T rows predict, in float32 and with a graph."""

    logprobs: torch.Tensor  # [T]
    entropy: torch.Tensor | None  # [T]
    candidates: torch.Tensor | None  # [T, K] log-probs, without truncation
    full: torch.Tensor | None  # [T] the targets' log-probs without truncation; None without truncation


def target_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
    entropy: bool = False,
    candidates: torch.Tensor | None = None,
    truncation: Truncation | None = None,
    function: HeadFunction = LINEAR,
) -> TargetOutputs:
    """Return the outputs of the rows `hidden` [T, H] with the targets [T] int64.

    weight [V, H], or this rank's rows of it. chunk: the number of rows whose logits exist at once; None: all rows. entropy:
    whether to compute the entropy. candidates [T, K] int64: tokens whose log-probs without truncation are returned too.
    function: the head's function.
    """
    chunk = chunk or len(targets)
    options = (temperature, chunk, shard, entropy, candidates, truncation, function)
    return TargetOutputs(*_Head.apply(hidden, weight, targets, *options))


@torch.no_grad()
def most_likely(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
    function: HeadFunction = LINEAR,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most likely tokens of each row of hidden [T, H], as (tokens [T, k] int64, log-probs [T, k] float32).

    They are sorted by falling probability; equally probable tokens are sorted by token. Raises ValueError unless `k` is from 1
    to the vocabulary's size.
    """
    vocabulary = torch.tensor(len(weight), device=hidden.device)
    if shard is not None:
        dist.all_reduce(vocabulary, group=shard.group)
    if not 0 < k <= vocabulary:
        raise ValueError(f"top_k: got {k}; expected 1 to {int(vocabulary)}, the size of the vocabulary")
    tokens = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(len(hidden), k, dtype=torch.float32, device=hidden.device)
    for rows in _chunks(len(hidden), chunk or len(hidden)):
        logits = _logits(hidden[rows], weight, temperature, function)
        normalizer, _ = _normalize(logits, logits.new_empty(len(logits), 0), shard)
        keys = _top(_sortable(logits, shard.start if shard else 0), k, shard)
        tokens[rows], values = _from_sortable(keys)
        logprobs[rows] = values - normalizer[:, None]
    return tokens, logprobs


class _Head(torch.autograd.Function):
    """Maps hidden [T, H], weight [V, H], targets [T] and candidates [T, K] to the fields of `TargetOutputs`."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, shard, with_entropy, candidates, truncation, function):
        ctx.temperature, ctx.chunk, ctx.shard, ctx.function = temperature, chunk, shard, function
        ctx.set_materialize_grads(False)  # unused outputs cost nothing
        token_ids = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], 1)  # [T, 1 + K]
        logprobs = torch.empty(token_ids.shape, dtype=torch.float32, device=hidden.device)  # without truncation
        full_normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)  # log sum exp of all
        normalizer, floor, drawn = full_normalizer, None, None
        if truncation is not None:
            normalizer, floor, drawn = (torch.empty_like(full_normalizer) for _ in range(3))  # after truncation; drawn: log p
        entropy = torch.empty_like(normalizer) if with_entropy else None
        softmax = None
        # With truncation two distributions may have gradients, and a soft cap needs the logits, so none is kept.
        keeps = len(hidden) <= chunk and truncation is None and function.softcap is None
        keeps = keeps and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        for rows in _chunks(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperature, function)
            local, owned = _local_targets(token_ids[rows], len(weight), shard)
            picked = logits.gather(1, local)
            full_normalizer[rows], picked = _normalize(logits, picked if owned is None else picked.where(owned, 0.0), shard)
            logprobs[rows] = picked - full_normalizer[rows, None]
            if truncation is not None:
                assert floor is not None and drawn is not None
                floor[rows] = truncation.floor(logits, full_normalizer[rows], shard.group if shard else None)
                logits.masked_fill_(logits < floor[rows, None], -torch.inf)
                normalizer[rows], _ = _normalize(logits, picked[:, :0], shard)
                drawn[rows] = torch.where(picked[:, 0] >= floor[rows], picked[:, 0] - normalizer[rows], -torch.inf)
            if not keeps and entropy is None:
                continue
            probabilities = logits.sub_(normalizer[rows, None]).exp_()
            if keeps:
                softmax = probabilities
            if entropy is not None:
                entropy[rows] = _sum_over_shards(torch.special.entr(probabilities).sum(1), shard)  # of p: -p log p, 0 at 0
        inside = None if drawn is None else drawn.isfinite()
        ctx.save_for_backward(hidden, weight, token_ids, normalizer, entropy, softmax, full_normalizer, floor, inside)
        candidate_logprobs = None if candidates is None else logprobs[:, 1:]
        if truncation is None:
            return logprobs[:, 0], entropy, candidate_logprobs, None
        return drawn, entropy, candidate_logprobs, logprobs[:, 0]

    @staticmethod
    def backward(ctx, grad_targets, grad_entropy, grad_candidates, grad_full):
        hidden, weight, token_ids, normalizer, entropy, softmax, full_normalizer, floor, inside = ctx.saved_tensors
        if inside is not None and grad_targets is not None:
            grad_targets = grad_targets.where(inside, 0.0)
        grad_untruncated = _join_gradients(grad_full, grad_candidates, token_ids)
        grad_wanted = _join_gradients(grad_targets, None, token_ids) + grad_untruncated
        # The factor of the probability itself, which d log p / d z and d H / d z have in common.
        grad_softmax = -grad_wanted.sum(1) if floor is None else -(grad_wanted - grad_untruncated).sum(1)
        if grad_entropy is not None:
            grad_softmax = grad_softmax - grad_entropy * entropy
        two = floor is not None and (grad_full is not None or grad_candidates is not None)
        grad_hidden = torch.empty_like(hidden)
        several = len(hidden) > ctx.chunk
        # In float32, so that half precision does not round after each chunk.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if several else None
        for rows in _chunks(len(hidden), ctx.chunk):
            probabilities, untruncated, slope = softmax, None, ctx.function.scale
            if softmax is None:
                logits = _logits(hidden[rows], weight, 1.0, ctx.function)
                slope = ctx.function.slope(logits)
                logits.div_(ctx.temperature)
                untruncated = (logits - full_normalizer[rows, None]).exp_() if two else None
                if floor is not None:
                    logits.masked_fill_(logits < floor[rows, None], -torch.inf)
                probabilities = logits.sub_(normalizer[rows, None]).exp_()
            # Not in place: the graph may be run backward twice.
            grad_logits = probabilities * (grad_softmax[rows, None] / ctx.temperature)
            if grad_entropy is not None:
                grad_logits.addcmul_(torch.special.entr(probabilities), grad_entropy[rows, None] / ctx.temperature)
            if two:
                grad_logits.addcmul_(untruncated, -grad_untruncated[rows].sum(1, keepdim=True) / ctx.temperature)
            local, owned = _local_targets(token_ids[rows], len(weight), ctx.shard)
            grad_local = grad_wanted[rows] / ctx.temperature
            grad_logits.scatter_add_(1, local, grad_local if owned is None else grad_local.where(owned, 0.0))
            if ctx.function != LINEAR:
                grad_logits.mul_(slope)
            grad_logits = grad_logits.to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if several:
                grad_weight += grad_logits.T @ hidden[rows]
            else:
                grad_weight = grad_logits.T @ hidden
        _sum_over_shards(grad_hidden, ctx.shard)  # each rank computed its part of the vocabulary
        assert grad_weight is not None  # there is at least one chunk
        return grad_hidden, grad_weight.to(weight.dtype), *(None,) * 8


def _join_gradients(
    grad_targets: torch.Tensor | None, grad_candidates: torch.Tensor | None, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of the target's and the candidates' log-probs, [T, 1 + K] float32; 0 for those that are None."""
    joined = torch.zeros(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    if grad_targets is not None:
        joined[:, 0] = grad_targets
    if grad_candidates is not None:
        joined[:, 1:] = grad_candidates
    return joined


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, function: HeadFunction) -> torch.Tensor:
    """Return logits [rows, V] float32. The product is in the model's precision, as in inference engines."""
    logits = function.apply_((hidden @ weight.T).float())
    return logits.div_(temperature) if temperature != 1.0 else logits


def _sum_over_shards(partial: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    """Sum over the ranks that share the vocabulary, in place."""
    if shard is not None:
        dist.all_reduce(partial, group=shard.group)
    return partial


def _normalize(logits: torch.Tensor, picked: torch.Tensor, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log sum exp [rows], picked logits [rows, K]) over the whole vocabulary.

    logits [rows, V]: this rank's logits. picked [rows, K]: the picked logits that this rank has, 0 for those of other ranks.
    """
    normalizer = logits.logsumexp(1)
    if shard is None:
        return normalizer, picked
    highest = normalizer.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
    sums = _sum_over_shards(torch.cat([picked, (normalizer - highest).exp()[:, None]], 1), shard)
    return highest + sums[:, -1].log(), sums[:, :-1]


def _local_targets(targets: torch.Tensor, rows: int, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (indices into this rank's rows of the head, mask of the targets that this rank has).

    rows: the number of this rank's rows. The mask is None if this rank has all rows.
    """
    if shard is None:
        return targets, None
    local = targets - shard.start
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


# ---- the most likely tokens -------------------------------------------------------------------------------------------------

# torch.topk returns any of equal entries, and in half precision many logits are equal. So int64 keys are sorted: the upper half
# is the logit as an ordered integer, the lower half is the token, with lower tokens first.
_LAST = (1 << 32) - 1


def _sortable(logits: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sort keys [rows, V] int64 of logits [rows, V] float32. start: the token of the first column."""
    keys = float_order(logits + 0.0).long() << 32  # + 0.0 turns -0.0 into 0.0
    return keys.add_(_LAST - start - torch.arange(logits.size(1), device=logits.device))


def _from_sortable(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, logits) of keys that `_sortable` made."""
    return _LAST - (keys & _LAST), from_float_order((keys >> 32).int())


def _top(keys: torch.Tensor, k: int, shard: VocabularyShard | None) -> torch.Tensor:
    """Return the k highest keys of each row over the whole vocabulary, [rows, k] in falling order."""
    if shard is None:
        return keys.topk(k, 1).values
    local = keys.new_full((len(keys), k), torch.iinfo(torch.int64).min)  # a rank may have fewer tokens than k
    fewer = min(k, keys.size(1))
    local[:, :fewer] = keys.topk(fewer, 1).values
    gathered = [torch.empty_like(local) for _ in range(shard.group.size())]
    dist.all_gather(gathered, local, group=shard.group)
    return torch.cat(gathered, 1).topk(k, 1).values
