"""Compute advantages of tokens on the train ranks, in torch. Each formula cites its paper and equation.

    by token       `estimate_gae`, `subtract_future_kl`                                                 PPO, VAPO, REINFORCE++
    standardized   to mean 0 and variance 1 over a step: `moments`, `normalization`, `standardize`           REINFORCE++, PPO
    selected       0 but for tokens of high entropy: `keep_high_entropy`                               https://arxiv.org/abs/2506.01939

Not supported: discounting in REINFORCE++, bootstrapping the value of a truncated answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from pipeline.algorithms.algorithm import Variance
from pipeline.algorithms.loss import kl_in_reward
from pipeline.algorithms.reductions import sequence_sums, values_before
from pipeline.algorithms.sections import GAEConfig, LossConfig
from pipeline.types import AdvantageNormalization, GlobalCounts, Moments, PackedBatch

STEP_EPSILON = 1e-8  # keeps a step's division finite


def subtract_future_kl(batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """Return A_t = A - beta sum_{s >= t} KL_s over the counted tokens of an answer, `[T]` (REINFORCE++).

    As in the paper, the sum includes the KL of the tokens after t. NeMo-RL subtracts only the token's own KL.
    """
    kl = discounted_sums(gather_counted(kl_in_reward(batch, config), batch), 1.0)
    return batch.advantages - config.reference_policy_kl_penalty * scatter_counted(kl, batch)


def estimate_gae(
    batch: PackedBatch, gae: GAEConfig, loss: LossConfig, of_tokens: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), `[T]` each, 0 where the mask is False (GAE, https://arxiv.org/abs/1506.02438 eq. 16).

        d_t = r_t + gamma V_{t+1} - V_t
        A_t = sum_{l >= 0} (gamma lambda)^l d_{t+l}
        R_t = A_t + V_t                                 the critic's target

    t runs only over the counted tokens of a sequence and skips the output of tools and users between them. V_t is the critic's
    value of the text before token t. The reward arrives with the last counted token, after which V is 0; or, with of_tokens,
    `batch.advantages` has each token's reward. With use_kl_in_reward every token's reward includes - beta KL_t.

    The critic and the policy may use different lambdas (VAPO, https://arxiv.org/abs/2504.05118). With gae_lambda_value=1 the
    critic does not bias the returns. With length_adaptive_alpha = a, the policy's lambda is 1 - 1 / (a l) for an answer of l
    tokens (eq. 9).
    """
    assert batch.old_values is not None
    rewards = _token_rewards(batch, loss, of_tokens)
    values = gather_counted(values_before(batch.old_values), batch)
    next_values = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    errors = rewards + gae.gae_gamma * next_values - values
    advantages = discounted_sums(errors, gae.gae_gamma * _policy_lambda(batch, gae))
    value_lambda = gae.gae_lambda if gae.gae_lambda_value is None else gae.gae_lambda_value
    returns = discounted_sums(errors, gae.gae_gamma * value_lambda) + values
    return scatter_counted(advantages, batch), scatter_counted(returns, batch)


def _token_rewards(batch: PackedBatch, loss: LossConfig, of_tokens: bool) -> torch.Tensor:
    """Return the rewards of tokens, or the sequence's at its last counted token, minus the KL penalty of each: `[S, C]`."""
    rewards = torch.zeros_like(batch.advantages)
    if loss.use_kl_in_reward:
        rewards = -loss.reference_policy_kl_penalty * kl_in_reward(batch, loss)
    if of_tokens:
        return gather_counted(rewards + batch.advantages, batch)
    grid, sizes = gather_counted(rewards, batch), _sizes(batch)
    grid[torch.arange(len(sizes), device=sizes.device), (sizes - 1).clamp(min=0)] += torch.where(sizes > 0, batch.rewards, 0.0)
    return grid


def _policy_lambda(batch: PackedBatch, gae: GAEConfig) -> float | torch.Tensor:
    """Return the policy's lambda: a number for all sequences, or one per sequence, `[S, 1]`."""
    if gae.length_adaptive_alpha > 0:
        return 1 - 1 / (gae.length_adaptive_alpha * _sizes(batch).to(batch.advantages.dtype)).clamp(min=1)[:, None]
    return gae.gae_lambda if gae.gae_lambda_policy is None else gae.gae_lambda_policy


def discounted_sums(terms: torch.Tensor, decay: float | torch.Tensor) -> torch.Tensor:
    """Return sum_l decay^l terms[:, t + l] at each t, `[S, C]`. decay: a number, or one per sequence, `[S, 1]`.

    This takes log2 C passes: each pass adds the sum of the next k terms to a sum of k terms, which gives a sum of 2 k terms.
    """
    sums, reach = terms, 1
    factor = torch.as_tensor(decay, dtype=terms.dtype, device=terms.device)
    while reach < terms.shape[1]:
        later = pad(sums[:, reach:], (0, reach))
        sums, factor, reach = sums + factor * later, factor.square(), 2 * reach
    return sums


def gather_counted(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Gather each sequence's counted tokens in a row that is padded with 0: `[T]` -> `[S, C]`.

    C is the largest number of counted tokens of a sequence, at least 1.
    """
    grid = _grid(batch)
    padded = values.new_zeros(grid.shape)
    padded[grid] = values[batch.loss_mask]
    return padded


def scatter_counted(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Put the values of counted tokens back to their positions, and 0 elsewhere: `[S, C]` of `gather_counted` -> `[T]`."""
    packed = values.new_zeros(len(batch.loss_mask))
    packed[batch.loss_mask] = values[_grid(batch)]
    return packed


def _grid(batch: PackedBatch) -> torch.Tensor:
    """Return a mask of the entries of `gather_counted` that are tokens and not padding, `[S, C]` bool."""
    sizes = _sizes(batch)
    return torch.arange(max(1, int(sizes.max())), device=sizes.device) < sizes[:, None]


def _sizes(batch: PackedBatch) -> torch.Tensor:
    """Return how many tokens of each sequence count, `[S]` int64."""
    return sequence_sums(torch.ones_like(batch.tokens), batch)


# ---- standardized over the counted tokens of a step, however those are spread over ranks and microbatches ----------------


def moments(batches: Sequence[PackedBatch]) -> Moments:
    """Return sums over the counted tokens of one update on one data-parallel rank, in float64.

    batches: the update's microbatches after `estimate`, which may have changed their masks.
    """
    advantages = torch.cat([batch.advantages[batch.loss_mask] for batch in batches]).double()
    sequences = sum(int(mask.any()) for batch in batches for mask in batch.loss_mask.split(batch.lengths))
    return Moments(advantages.sum().item(), advantages.square().sum().item(), GlobalCounts(len(advantages), sequences))


def normalization(by_rank: Sequence[Sequence[Moments]], variance: Variance | None) -> AdvantageNormalization:
    """Return the mean and the scale with which all ranks standardize, and the counts of each update.

    by_rank[data rank][update]: moments.

    biased      A <- (A - mean) / sqrt(max(sum (A - mean)^2 / n, 1e-8))          NeMo-RL's REINFORCE++
    unbiased    A <- (A - mean) / sqrt(sum (A - mean)^2 / (n - 1) + 1e-8)        NeMo-RL's and verl's GAE
    None        A is unchanged
    """
    updates = [list(of_update) for of_update in zip(*by_rank, strict=True)]
    counts = [GlobalCounts(sum(m.counts.tokens for m in update), sum(m.counts.sequences for m in update)) for update in updates]
    if variance is None:
        return AdvantageNormalization(0.0, 1.0, counts)
    everything = [m for update in updates for m in update]
    tokens = max(1, sum(m.counts.tokens for m in everything))
    mean = sum(m.sum for m in everything) / tokens
    biased = max(0.0, sum(m.squares for m in everything) / tokens - mean * mean)
    if variance == "biased":
        return AdvantageNormalization(mean, max(biased, STEP_EPSILON) ** -0.5, counts)
    return AdvantageNormalization(mean, (biased * tokens / max(1, tokens - 1) + STEP_EPSILON) ** -0.5, counts)


def standardize(batch: PackedBatch, to: AdvantageNormalization) -> PackedBatch:
    """Return the batch with standardized advantages, 0 where the mask is False."""
    advantages = torch.where(batch.loss_mask, (batch.advantages - to.mean) * to.scale, 0.0)
    return dataclasses.replace(batch, advantages=advantages)


# ---- tokens of high entropy, over the counted tokens of an update, however those are spread ---------------------------------


def keep_high_entropy(
    batches: Sequence[PackedBatch], share: float, total: Callable[[int], int]
) -> tuple[list[PackedBatch], float]:
    """Return one update's batches, with advantages of 0 where the entropy is below a threshold, and this threshold in nats.

    The threshold is the lowest entropy that reaches the quantile 1 - share of the counted tokens; nan if no token counts.
    The entropy is `old_entropy`, and the tokens are the update's on all ranks (https://arxiv.org/abs/2506.01939). total: sums a
    count over the data-parallel ranks. Every surrogate is a multiple of the advantage, so that such a token has no part in it.
    TRL computes the quantile for each microbatch of all processes, from the policy as it is then.
    """
    counted = [_entropies(batch)[batch.loss_mask] for batch in batches]
    if not (tokens := total(sum(map(len, counted)))):
        return list(batches), math.nan
    # TRL interpolates between two entropies. A token reaches such a quantile if it reaches the larger one of the two.
    below = math.ceil(round((1 - share) * (tokens - 1), 6))
    threshold = _kth_smallest(torch.cat(counted), below, total)
    kept = [
        dataclasses.replace(batch, advantages=batch.advantages.masked_fill(_entropies(batch) < threshold, 0.0))
        for batch in batches
    ]
    return kept, threshold


def _entropies(batch: PackedBatch) -> torch.Tensor:
    assert batch.old_entropy is not None
    return batch.old_entropy.float().clamp(min=0)  # rounding may give a number just below 0


def _kth_smallest(values: torch.Tensor, k: int, total: Callable[[int], int]) -> float:
    """Return the value on any rank that k values are before in ascending order. values: float32 of at least 0, of this rank.

    Such numbers have the order of their bits, and bisection of the bits takes 32 sums over ranks, and no memory.
    """
    bits, low, high = values.view(torch.int32), -1, torch.iinfo(torch.int32).max
    while high - low > 1:
        middle = (low + high) // 2
        if total(int((bits <= middle).sum())) > k:
            high = middle
        else:
            low = middle
    return float(np.int32(high).view(np.float32))
