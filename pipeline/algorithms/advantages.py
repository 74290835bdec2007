"""Compute advantages of answers from rewards, on rank 0, in numpy. Each formula cites its paper and equation.

    rewards        scaled and shaped: `scaled_rewards`, `shaped_rewards`                                        NeMo-RL, DAPO
    by prompt      `group_advantages`, `sequence_advantages`                                  GRPO, RLOO, Dr. GRPO, REINFORCE++

several_rewards.py has the advantages of several rewards, turn_credit.py those of single turns, and token_advantages.py those of
tokens, which train ranks compute.

Not supported: rewards for parts of a turn, Dr. GRPO's constant divisor.
Dr. GRPO divides a step's sum of losses by the longest possible answer times the number of sequences. Our losses divide by the
number of counted tokens, so the gradient has the same direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pipeline.algorithms.sections import RewardedConfig, RewardScalingConfig, RewardShapingConfig
from pipeline.algorithms.turn_credit import penalty
from pipeline.types import NO_EXPERT, Branch, Prompt, Rollout, RolloutGroup, Sample

ROUNDING = 1e-5  # relative; float32 rewards of one answer in different batches differ by less
GROUP_EPSILON = 1e-6  # keeps a group's division finite, as in NeMo-RL


# ---- rewards -------------------------------------------------------------------------------------------------------------


def scaled_rewards(group: RolloutGroup, config: RewardScalingConfig) -> np.ndarray:
    """Return the rewards mapped by `scaled`, `[G]` float64. Ignore entries of failed episodes."""
    return scaled(np.array([rollout.reward for rollout in group.rollouts], np.float64), config)


def scaled(rewards: np.ndarray, config: RewardScalingConfig) -> np.ndarray:
    """Return rewards mapped from the source range to the target range, `[G]`.

    target_min + (clamp(r, source_min, source_max) - source_min) (target_max - target_min) / (source_max - source_min)
    """
    if not config.enabled:
        return rewards
    share = (rewards.clip(config.source_min, config.source_max) - config.source_min) / (config.source_max - config.source_min)
    return config.target_min + share * (config.target_max - config.target_min)


def shaped_rewards(group: RolloutGroup, config: RewardedConfig) -> np.ndarray:
    """Return the scaled and shaped rewards: `[G]` float64.

    Shaping adds DAPO's penalty for long answers. If stop_properly_penalty_coef is set, shaping instead multiplies the rewards
    of truncated answers by it. Each truncated or malformed turn costs its penalty.
    """
    rewards, shaping = scaled_rewards(group, config.reward_scaling), config.reward_shaping
    if shaping.enabled and shaping.stop_properly_penalty_coef is not None:
        truncated = [is_truncated(rollout) for rollout in group.rollouts]
        rewards = np.where(truncated, rewards * shaping.stop_properly_penalty_coef, rewards)
    elif shaping.enabled:
        rewards = rewards + soft_overlong_penalty(np.array([rollout.drawn_tokens for rollout in group.rollouts]), shaping)
    return rewards - np.array([penalty(rollout, config) for rollout in group.rollouts], np.float64)


def soft_overlong_penalty(lengths: np.ndarray, config: RewardShapingConfig) -> np.ndarray:
    """Return the penalty for answers of these `[G]` lengths in tokens (DAPO, https://arxiv.org/abs/2503.14476 eq. 13).

    The penalty is 0 up to max_response_length - overlong_buffer_length tokens and falls linearly to -overlong_buffer_penalty at
    max_response_length. It keeps falling beyond that, as in NeMo-RL and verl; eq. 13 stays at -1.
    """
    start = config.max_response_length - config.overlong_buffer_length
    return -config.overlong_buffer_penalty * ((lengths - start) / config.overlong_buffer_length).clip(0)


def is_truncated(rollout: Rollout) -> bool:
    """Return whether the answer (of several turns: its last turn) ended because it reached the length limit."""
    return rollout.finish == "length"


def scored_mask(group: RolloutGroup) -> np.ndarray:
    """Return a mask of the episodes with a reward, `[G]` bool. Episodes that failed in their environment have none."""
    return np.array([not rollout.failure for rollout in group.rollouts], np.bool_)


def varies(rewards: np.ndarray) -> bool:
    """Return whether the `[G]` rewards of one prompt differ by more than rounding."""
    return len(rewards) > 1 and bool(np.ptp(rewards) > ROUNDING * max(1.0, np.abs(rewards).max()))


def select_groups(groups: list[RolloutGroup], config: RewardedConfig) -> list[RolloutGroup]:
    """Return the groups to train on: with dynamic sampling those whose rewards vary (DAPO eq. 11), else all.

    We compare rewards before shaping, as NeMo-RL does: different lengths alone do not make a group informative. DAPO keeps
    groups with an accuracy strictly between 0 and 1; for rewards of 0 and 1 these are the same groups.
    """
    if not config.use_dynamic_sampling:
        return groups
    return [group for group in groups if varies(scaled_rewards(group, config.reward_scaling)[scored_mask(group)])]


def make_sample(
    prompt: Prompt,
    rollout: Rollout,
    advantage: float | np.ndarray,
    reward: float,
    counts: bool | np.ndarray = True,
) -> Sample:
    """Return a rollout as a sample, with a sample in `branches` for each of its other conversations.

    advantage: of all turns, or of each entry of `rollout.turns`, `[N]`; turns of other conversations have that of the first
    entry, whose return is the episode's. counts: whether the loss counts the rollout, or each entry of `rollout.all_turns`. It
    never counts failed episodes.
    """
    at = len(rollout.turns)
    advantages = np.broadcast_to(advantage, at)
    learned = np.broadcast_to(counts, len(rollout.all_turns)) & (not rollout.failure)
    credited = 0.0 if rollout.failure else float(reward)
    first, *others = rollout.conversations(prompt)
    sample, branches = _conversation_sample(first, advantages, learned[:at], credited), []
    for other in others:
        own = slice(at, at := at + len(other.turns))
        branches.append(_conversation_sample(other, np.full(len(other.turns), advantages[0]), learned[own], credited))
    return replace(sample, branches=tuple(branches)) if branches else sample


def _conversation_sample(conversation: Branch, of_turns: np.ndarray, learned: np.ndarray, reward: float) -> Sample:
    """Return a conversation as one sequence. of_turns, learned: each turn's advantage, and whether the loss counts it."""
    at = len(conversation.context)
    length = at + sum(len(turn.completion.tokens) + len(turn.observation) for turn in conversation.turns)
    tokens, mask = np.empty(length, np.int32), np.zeros(length, np.bool_)
    logprobs, advantages = np.zeros(length, np.float32), np.zeros(length, np.float32)
    tokens[:at] = conversation.context
    for place, turn in enumerate(conversation.turns):
        sampled, observed = turn.completion.tokens, turn.observation
        span = slice(at, at + len(sampled))
        tokens[span] = sampled
        if learned[place]:
            mask[span], logprobs[span], advantages[span] = True, turn.completion.logprobs, of_turns[place]
        at += len(sampled) + len(observed)
        tokens[at - len(observed) : at] = observed
    return Sample(tokens, mask, logprobs, advantages, reward, experts=_experts(conversation))


def _experts(conversation: Branch) -> np.ndarray | None:
    """Return the experts that the engine recorded, see Sample.experts; None without records."""
    parts: list[np.ndarray] = []
    at, end = len(conversation.context), 0  # tokens so far; tokens with a row in `parts`
    for turn in conversation.turns:
        at += len(turn.completion.tokens)
        if (rows := turn.completion.experts) is not None:
            first = at - 1 - len(rows)
            if first > end:  # a turn before, perhaps of another conversation, has them
                parts.append(np.full((first - end, *rows.shape[1:]), NO_EXPERT, np.int16))
            parts.append(rows[max(0, end - first) :])
            end = at - 1
        at += len(turn.observation)
    return np.concatenate(parts) if parts else None


# ---- advantages of the answers to one prompt -----------------------------------------------------------------------------


def apply_to_scored(group: RolloutGroup, rewards: np.ndarray, estimator: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return advantages, `[G]`: `estimator` of the rewards of scored episodes, and 0 for failed episodes.

    Failed episodes have no influence on the baselines.
    """
    advantages, among = np.zeros(len(rewards)), scored_mask(group)
    if among.any():
        advantages[among] = estimator(rewards[among])
    return advantages


def group_advantages(rewards: np.ndarray, use_leave_one_out: bool, normalize: bool) -> np.ndarray:
    """Return A_i = (r_i - b_i) / s_i for the `[G]` float64 rewards of one prompt; 0 if they do not vary.

    b_i: the mean of the group (GRPO, https://arxiv.org/abs/2402.03300 sec. 4.1), or of the other answers (RLOO).
    s_i: with `normalize` the unbiased standard deviation of the rewards that b_i averages; 1 if these do not vary, or without
    `normalize` (Dr. GRPO, RLOO).

    With rewards other than 0 and 1, use_leave_one_out together with normalize gives unbounded advantages: the deviation of the
    other rewards can be much smaller than the distance of r_i from their mean. With the mean of the whole group |A_i| is below
    sqrt(G).
    """
    rewards = np.asarray(rewards, np.float64)
    if not varies(rewards):
        return np.zeros(len(rewards))
    advantages = leave_one_out(rewards) if use_leave_one_out else center(rewards)
    if not normalize:
        return advantages
    baselines = [np.delete(rewards, i) if use_leave_one_out else rewards for i in range(len(rewards))]
    # The deviation of equal numbers may round to above 0.
    deviations = np.array([baseline.std(ddof=1) if varies(baseline) else 0.0 for baseline in baselines])
    return np.where(deviations > 0, advantages / (deviations + GROUP_EPSILON), advantages)


def center(rewards: np.ndarray) -> np.ndarray:
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
    return center(rewards) if minus_baseline else rewards
