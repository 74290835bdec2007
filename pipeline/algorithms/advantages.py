"""Compute advantages from rewards. Each formula cites its paper and equation.

    rewards        scaled and shaped: `scaled_rewards`, `shaped_rewards`                                        NeMo-RL, DAPO
    by prompt      on rank 0, in numpy: `group_advantages`, `sequence_advantages`             GRPO, RLOO, Dr. GRPO, REINFORCE++
    by token       on the train ranks, in torch: `estimate_gae`, `subtract_future_kl`                   PPO, VAPO, REINFORCE++
    standardized   to mean 0 and variance 1 over a step: `moments`, `normalization`, `standardize`           REINFORCE++, PPO

Not supported: rewards of several components, process supervision (rewards for parts of an answer), discounting in REINFORCE++,
bootstrapping the value of a truncated answer. Dr. GRPO divides a step's sum of losses by a constant, the longest possible
answer times the number of sequences. This code divides by the number of counted tokens; the direction is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from pipeline.algorithms.algorithm import Variance
from pipeline.algorithms.loss import kl_in_reward
from pipeline.algorithms.reductions import sequence_sums, values_before
from pipeline.algorithms.sections import GAEConfig, LossConfig, RewardedConfig, RewardScalingConfig, RewardShapingConfig
from pipeline.types import AdvantageNormalization, GlobalCounts, Moments, PackedBatch, Prompt, Rollout, RolloutGroup, Sample

ROUNDING = 1e-5  # relative; float32 rewards of one answer in different batches differ by less
GROUP_EPSILON = 1e-6  # keeps a group's division finite, as in NeMo-RL
STEP_EPSILON = 1e-8  # the same for a step


# ---- rewards -------------------------------------------------------------------------------------------------------------


def scaled_rewards(group: RolloutGroup, config: RewardScalingConfig) -> np.ndarray:
    """Map rewards from the source range to the target range: `[G]` float64. Entries of failed episodes are meaningless.

    target_min + (clamp(r, source_min, source_max) - source_min) (target_max - target_min) / (source_max - source_min)
    """
    rewards = np.array([rollout.reward for rollout in group.rollouts], np.float64)
    if not config.enabled:
        return rewards
    share = (rewards.clip(config.source_min, config.source_max) - config.source_min) / (config.source_max - config.source_min)
    return config.target_min + share * (config.target_max - config.target_min)


def shaped_rewards(group: RolloutGroup, config: RewardedConfig) -> np.ndarray:
    """Return the scaled and shaped rewards: `[G]` float64.

    Shaping adds DAPO's penalty for long answers. With stop_properly_penalty_coef it instead multiplies the rewards of truncated
    answers.
    """
    rewards, shaping = scaled_rewards(group, config.reward_scaling), config.reward_shaping
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        return np.where(
            [is_truncated(rollout) for rollout in group.rollouts], rewards * shaping.stop_properly_penalty_coef, rewards
        )
    return rewards + soft_overlong_penalty(np.array([rollout.drawn_tokens for rollout in group.rollouts]), shaping)


def soft_overlong_penalty(lengths: np.ndarray, config: RewardShapingConfig) -> np.ndarray:
    """Return the penalty for answers of these `[G]` lengths in tokens (DAPO, https://arxiv.org/abs/2503.14476 eq. 13).

    The penalty is 0 up to max_response_length - overlong_buffer_length tokens and falls linearly to -overlong_buffer_penalty at
    max_response_length. It keeps falling beyond that, as in NeMo-RL and verl; eq. 13 stays at -1.
    """
    start = config.max_response_length - config.overlong_buffer_length
    return -config.overlong_buffer_penalty * ((lengths - start) / config.overlong_buffer_length).clip(0)


def is_truncated(rollout: Rollout) -> bool:
    """Return whether the answer, or its last turn, ended because it reached the length limit."""
    return rollout.finish == "length"


def scored_mask(group: RolloutGroup) -> np.ndarray:
    """Return False for episodes that failed in their environment and have no reward: `[G]` bool."""
    return np.array([not rollout.failure for rollout in group.rollouts], np.bool_)


def varies(rewards: np.ndarray) -> bool:
    """Return whether the `[G]` rewards of one prompt differ by more than rounding."""
    return len(rewards) > 1 and bool(np.ptp(rewards) > ROUNDING * max(1.0, np.abs(rewards).max()))


def select_groups(groups: list[RolloutGroup], config: RewardedConfig) -> list[RolloutGroup]:
    """Return the groups to train on: with dynamic sampling those whose rewards vary (DAPO eq. 11), else all.

    Rewards are compared before shaping, as in NeMo-RL: different lengths alone do not make a group informative. DAPO keeps
    groups with an accuracy strictly between 0 and 1, which is the same for rewards of 0 and 1.
    """
    if not config.use_dynamic_sampling:
        return groups
    return [group for group in groups if varies(scaled_rewards(group, config.reward_scaling)[scored_mask(group)])]


def make_sample(prompt: Prompt, rollout: Rollout, advantage: float, reward: float, counts: bool = True) -> Sample:
    """Return prompt and turns as one sequence. The loss counts the policy's own tokens, each with the advantage.

    counts: False to leave the sequence out of the loss. Failed episodes are always left out.
    """
    at, learned = len(prompt.tokens), counts and not rollout.failure
    length = at + sum(len(turn.completion.tokens) + len(turn.observation) for turn in rollout.turns)
    tokens, mask = np.empty(length, np.int32), np.zeros(length, np.bool_)
    logprobs, advantages = np.zeros(length, np.float32), np.zeros(length, np.float32)
    tokens[:at] = prompt.tokens
    for turn in rollout.turns:
        drawn, observed = turn.completion.tokens, turn.observation
        span = slice(at, at + len(drawn))
        tokens[span] = drawn
        if learned:
            mask[span], logprobs[span], advantages[span] = True, turn.completion.logprobs, advantage
        at += len(drawn) + len(observed)
        tokens[at - len(observed) : at] = observed
    return Sample(tokens, mask, logprobs, advantages, 0.0 if rollout.failure else float(reward))


# ---- advantages of the answers to one prompt -----------------------------------------------------------------------------


def apply_to_scored(group: RolloutGroup, rewards: np.ndarray, estimator: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply `estimator` to the `[G]` rewards of episodes that have one. Failed episodes get 0 and enter no baseline."""
    advantages, among = np.zeros(len(rewards)), scored_mask(group)
    if among.any():
        advantages[among] = estimator(rewards[among])
    return advantages


def group_advantages(rewards: np.ndarray, use_leave_one_out: bool, normalize: bool) -> np.ndarray:
    """Return A_i = (r_i - b_i) / s_i for the `[G]` float64 rewards of one prompt; 0 if they do not vary.

    b_i: the mean of the group (GRPO, https://arxiv.org/abs/2402.03300 sec. 4.1), or of the other answers (RLOO).
    s_i: with `normalize` the unbiased standard deviation of the rewards in b_i, if at least two of them vary; otherwise 1
    (Dr. GRPO, RLOO).

    With rewards other than 0 and 1, use_leave_one_out together with normalize gives unbounded advantages: the deviation of the
    other rewards can be much smaller than the distance from them. With the mean of the whole group |A_i| is below sqrt(G).
    """
    rewards = np.asarray(rewards, np.float64)
    if not varies(rewards):
        return np.zeros(len(rewards))
    advantages = leave_one_out(rewards) if use_leave_one_out else centered(rewards)
    if not normalize:
        return advantages
    baselines = [np.delete(rewards, i) if use_leave_one_out else rewards for i in range(len(rewards))]
    # The deviation of equal numbers may round to above 0.
    deviations = np.array([baseline.std(ddof=1) if varies(baseline) else 0.0 for baseline in baselines])
    return np.where(deviations > 0, advantages / (deviations + GROUP_EPSILON), advantages)


def centered(rewards: np.ndarray) -> np.ndarray:
    """Return r_i - mean(r_1 .. r_G), `[G]` (Dr. GRPO, https://arxiv.org/abs/2503.20783 eq. 4 without the deviation)."""
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return r_i - 1/(G-1) sum_{j != i} r_j, `[G]`; 0 for a single reward (RLOO, https://arxiv.org/abs/2402.14740 eq. 8)."""
    size = len(rewards)
    if size == 1:
        return np.zeros(1)
    return rewards - (rewards.sum() - rewards) / (size - 1)


def sequence_advantages(rewards: np.ndarray, minus_baseline: bool) -> np.ndarray:
    """Return REINFORCE++'s advantages of one prompt before standardization, `[G]` (https://arxiv.org/abs/2501.03262).

    minus_baseline: subtract the mean of the group first (REINFORCE++-baseline).
    """
    return centered(rewards) if minus_baseline else rewards


# ---- advantages of tokens ------------------------------------------------------------------------------------------------


def subtract_future_kl(batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """Return A_t = A - beta sum_{s >= t} KL_s over the counted tokens of an answer, `[T]` (REINFORCE++).

    NeMo-RL subtracts only a token's own KL. In the paper, and here, a token is also charged for the KL of the tokens after it.
    """
    kl = discounted_sums(gather_counted(kl_in_reward(batch, config), batch), 1.0)
    return batch.advantages - config.reference_policy_kl_penalty * scatter_counted(kl, batch)


def estimate_gae(batch: PackedBatch, gae: GAEConfig, loss: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), `[T]` each, 0 where the mask is False (GAE, https://arxiv.org/abs/1506.02438 eq. 16).

        d_t = r_t + gamma V_{t+1} - V_t
        A_t = sum_{l >= 0} (gamma lambda)^l d_{t+l}
        R_t = A_t + V_t                                 the critic's target

    t runs only over the counted tokens of a sequence and skips the output of tools and users between them. V_t is the critic's
    value of the text before token t. The reward arrives with the last counted token, after which V is 0. With use_kl_in_reward
    every token's reward includes - beta KL_t.

    The critic and the policy may use different lambdas (VAPO, https://arxiv.org/abs/2504.05118). With gae_lambda_value=1 the
    critic does not bias the returns. With length_adaptive_alpha = a, the policy's lambda is 1 - 1 / (a l) for an answer of l
    tokens (eq. 9).
    """
    assert batch.old_values is not None
    rewards = _token_rewards(batch, loss)
    values = gather_counted(values_before(batch.old_values), batch)
    after = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    errors = rewards + gae.gae_gamma * after - values
    advantages = discounted_sums(errors, gae.gae_gamma * _policy_lambda(batch, gae))
    value_lambda = gae.gae_lambda if gae.gae_lambda_value is None else gae.gae_lambda_value
    returns = discounted_sums(errors, gae.gae_gamma * value_lambda) + values
    return scatter_counted(advantages, batch), scatter_counted(returns, batch)


def _token_rewards(batch: PackedBatch, loss: LossConfig) -> torch.Tensor:
    """Return the sequence's reward at its last counted token, minus the KL penalty of each token: `[S, C]`."""
    rewards = torch.zeros_like(batch.advantages)
    if loss.use_kl_in_reward:
        rewards = -loss.reference_policy_kl_penalty * kl_in_reward(batch, loss)
    found, sizes = gather_counted(rewards, batch), _sizes(batch)
    found[torch.arange(len(sizes), device=sizes.device), (sizes - 1).clamp(min=0)] += torch.where(sizes > 0, batch.rewards, 0.0)
    return found


def _policy_lambda(batch: PackedBatch, gae: GAEConfig) -> float | torch.Tensor:
    """Return the policy's lambda: a number, or one per sequence, `[S, 1]`."""
    if gae.length_adaptive_alpha > 0:
        return 1 - 1 / (gae.length_adaptive_alpha * _sizes(batch).to(batch.advantages.dtype)).clamp(min=1)[:, None]
    return gae.gae_lambda if gae.gae_lambda_policy is None else gae.gae_lambda_policy


def discounted_sums(terms: torch.Tensor, decay: float | torch.Tensor) -> torch.Tensor:
    """Return sum_l decay^l terms[:, t + l], `[S, C]`. decay: a number, or `[S, 1]`.

    The sum takes log2 C passes: two sums of k terms, the second k terms later, make a sum of 2 k terms.
    """
    sums, reach = terms, 1
    factor = torch.as_tensor(decay, dtype=terms.dtype, device=terms.device)
    while reach < terms.shape[1]:
        later = pad(sums[:, reach:], (0, reach))
        sums, factor, reach = sums + factor * later, factor.square(), 2 * reach
    return sums


def gather_counted(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Gather each sequence's counted tokens from the left and pad with 0: `[T]` -> `[S, C]`, C the most of them, at least 1."""
    grid = _grid(batch)
    found = values.new_zeros(grid.shape)
    found[grid] = values[batch.loss_mask]
    return found


def scatter_counted(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Undo `gather_counted`; other tokens get 0: `[S, C]` -> `[T]`."""
    found = values.new_zeros(len(batch.loss_mask))
    found[batch.loss_mask] = values[_grid(batch)]
    return found


def _grid(batch: PackedBatch) -> torch.Tensor:
    """Return where `gather_counted` has a token, `[S, C]` bool."""
    sizes = _sizes(batch)
    return torch.arange(max(1, int(sizes.max())), device=sizes.device) < sizes[:, None]


def _sizes(batch: PackedBatch) -> torch.Tensor:
    """Return how many tokens of each sequence count, `[S]` int64."""
    return sequence_sums(torch.ones_like(batch.tokens), batch)


# ---- standardized over the counted tokens of a step, however those are spread over ranks and microbatches ----------------


def moments(batches: Sequence[PackedBatch]) -> Moments:
    """Return sums over the microbatches of one update on one data rank, in float64. `estimate` may have cleared a mask."""
    counted = torch.cat([batch.advantages[batch.loss_mask] for batch in batches]).double()
    sequences = sum(int(mask.any()) for batch in batches for mask in batch.loss_mask.split(batch.lengths))
    return Moments(counted.sum().item(), counted.square().sum().item(), GlobalCounts(len(counted), sequences))


def normalization(by_rank: Sequence[Sequence[Moments]], variance: Variance | None) -> AdvantageNormalization:
    """Return the mean that all ranks subtract and the scale that they multiply by. by_rank: moments by [data rank][update].

    biased      A <- (A - mean) / sqrt(max(sum (A - mean)^2 / n, 1e-8))          NeMo-RL's REINFORCE++
    unbiased    A <- (A - mean) / sqrt(sum (A - mean)^2 / (n - 1) + 1e-8)        NeMo-RL's and verl's GAE
    None        A stays; only the counts are new
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
