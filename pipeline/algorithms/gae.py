"""Generalized advantage estimation (https://arxiv.org/abs/1506.02438 eq. 16) on packed sequences.

    d_t = r_t + gamma V_{t+1} - V_t
    A_t = sum_{l >= 0} (gamma lambda)^l d_{t+l}
    R_t = A_t + V_t                                 what the critic learns

t runs over the counted tokens of a sequence alone: from one to the next, over whatever a tool or a user said in between. V_t is
the critic's value of what stands before token t. The reward comes with the last counted token, and after it V is 0; with
loss_fn.use_kl_in_reward every token's reward is besides - beta KL_t.

The critic's lambda may be another than the policy's (VAPO, https://arxiv.org/abs/2504.05118): with gae_lambda_value=1 returns
have no bias from the critic, and with length_adaptive_alpha = a the policy's is 1 - 1 / (a l) for an answer of l tokens, eq. 9,
so that how many tokens a reward reaches back over grows with the answer.

Left out: rewards in the middle of an answer, a value for what an answer that was cut might have become.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from pipeline.algorithms.kl import kl_in_reward
from pipeline.algorithms.reductions import sequence_sums
from pipeline.config import GAEConfig, LossConfig
from pipeline.types import PackedBatch


def estimate_gae(batch: PackedBatch, gae: GAEConfig, loss: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) `[T]` each, of the policy's lambda and of the critic's; 0 where the mask is False."""
    rewards = _token_rewards(batch, loss)
    values = rows(values_before(batch.old_values), batch)
    after = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    errors = rewards + gae.gae_gamma * after - values
    advantages = discounted_sums(errors, gae.gae_gamma * _policy_lambda(batch, gae))
    value_lambda = gae.gae_lambda if gae.gae_lambda_value is None else gae.gae_lambda_value
    returns = discounted_sums(errors, gae.gae_gamma * value_lambda) + values
    return scattered(advantages, batch), scattered(returns, batch)


def values_before(values: torch.Tensor) -> torch.Tensor:
    """`[T]` values after each token -> `[T]` before it. Where a sequence begins there is none, and the mask is False."""
    return torch.cat([values.new_zeros(1), values[:-1]])


def discounted_sums(terms: torch.Tensor, decay: float | torch.Tensor) -> torch.Tensor:
    """sum_l decay^l terms[:, t + l], `[S, C]`. decay: a number, or `[S, 1]`.

    In log C passes: what sums up k terms, and what does so k terms later, make up sums of 2 k.
    """
    sums, reach = terms, 1
    factor = torch.as_tensor(decay, dtype=terms.dtype, device=terms.device)
    while reach < terms.shape[1]:
        later = pad(sums[:, reach:], (0, reach))
        sums, factor, reach = sums + factor * later, factor.square(), 2 * reach
    return sums


def rows(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[T]` -> `[S, C]`: each sequence's counted tokens, from the left, then 0. C: the most of them, at least 1."""
    grid = _grid(batch)
    found = values.new_zeros(grid.shape)
    found[grid] = values[batch.loss_mask]
    return found


def scattered(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[S, C]` -> `[T]`: what `rows` gathered back in its place, 0 elsewhere."""
    found = values.new_zeros(len(batch.loss_mask))
    found[batch.loss_mask] = values[_grid(batch)]
    return found


def _grid(batch: PackedBatch) -> torch.Tensor:
    """`[S, C]` bool: where `rows` has a token."""
    sizes = _sizes(batch)
    return torch.arange(max(1, int(sizes.max())), device=sizes.device) < sizes[:, None]


def _sizes(batch: PackedBatch) -> torch.Tensor:
    """`[S]` int64: how many tokens of a sequence count."""
    return sequence_sums(torch.ones_like(batch.tokens), batch)


def _token_rewards(batch: PackedBatch, loss: LossConfig) -> torch.Tensor:
    """`[S, C]`: the sequence's reward with its last counted token, less what the KL costs at each."""
    rewards = torch.zeros_like(batch.old_values)
    if loss.use_kl_in_reward:
        rewards = -loss.reference_policy_kl_penalty * kl_in_reward(batch, loss)
    found, sizes = rows(rewards, batch), _sizes(batch)
    found[torch.arange(len(sizes), device=sizes.device), (sizes - 1).clamp(min=0)] += torch.where(sizes > 0, batch.rewards, 0.0)
    return found


def _policy_lambda(batch: PackedBatch, gae: GAEConfig) -> float | torch.Tensor:
    """A number, or `[S, 1]`."""
    if gae.length_adaptive_alpha > 0:
        return 1 - 1 / (gae.length_adaptive_alpha * _sizes(batch).to(batch.old_values.dtype)).clamp(min=1)[:, None]
    return gae.gae_lambda if gae.gae_lambda_policy is None else gae.gae_lambda_policy
