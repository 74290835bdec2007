"""Compute credit for single turns of an episode, on rank 0 in numpy: rewards of turns, returns, and advantages.

    G_ik = sum_{j >= k} gamma^(j - k) r_ij          the return of episode i from turn k on       GiGPO, eq. 5
    A_ik = the advantage of G_ik among the G_jk of the group's episodes j that have a turn k                  eq. 7

The advantage is that of the algorithm's estimator: with or without the turn itself in the mean, and divided by the deviation
or not. GiGPO (https://arxiv.org/abs/2505.10978) compares turns that begin in the same state of the environment, which only the
environment knows; we compare turns of the same number. Both are baselines that keep the policy's gradient unbiased if the turn
itself is left out. A turn that no other episode reaches has nothing to compare with. It gets the advantage of its episode, to
which GiGPO degrades too. GiGPO adds the advantage of the episode to that of each turn (eq. 8). We do not, so that turns are not
credited with rewards before them. GiGPO has gamma = 0.95. GTPO (https://arxiv.org/abs/2511.14846) has normalized discounted
returns of turns as advantages, too.

Episodes of one turn have the advantages of `credit: episode`, to the last bit. Other definitions suit episodes of equally many
turns: MT-GRPO (https://arxiv.org/abs/2505.11821) normalizes each turn's own reward and the last reward, and adds them up;
process supervision of the GRPO paper (https://arxiv.org/abs/2402.03300 sec. 4.1.3) normalizes all rewards of a group alike and
adds up those that follow, so that the sum depends on the number of turns that are left.

With a critic (PPO) a turn's reward arrives with the turn's last token, as in MT-PPO (https://arxiv.org/abs/2505.11821). Not
supported: a second discount over turns (bi-level GAE, https://arxiv.org/abs/2504.20073), one value for each turn (Turn-PPO,
https://arxiv.org/abs/2512.17008), turns grouped by the environment's state.

A turn of thoughts belongs to the answer after it: both are one turn here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.types import RolloutGroup

if TYPE_CHECKING:
    from pipeline.algorithms.sections import RewardedConfig
    from pipeline.types import Rollout, Sample, Turn

Estimator = Callable[[RolloutGroup, np.ndarray], Sequence[float] | np.ndarray]
"""(a group, a number for each of its rollouts, `[G]`) -> their advantages, `[G]`."""


def answer_numbers(rollout: Rollout) -> np.ndarray:
    """Return the number of the answer, in [0, K), that each entry of `rollout.turns` belongs to."""
    ends = [not turn.thinking for turn in rollout.turns]
    return np.cumsum([0, *ends])[: len(ends)]


def malformed_turns(rollout: Rollout) -> np.ndarray:
    """Return a mask of the entries of `rollout.turns` that belong to a malformed turn, `[N]` bool."""
    return _of_entries(rollout, [turn.malformed for turn in rollout.judged_turns])


def penalties(rollout: Rollout, config: RewardedConfig) -> list[float]:
    """Return the penalty of each of a rollout's K turns, for those that are truncated or malformed."""
    truncated, malformed = config.truncated_turn_penalty, config.malformed_turn_penalty
    return [truncated * _is_truncated(turn) + malformed * turn.malformed for turn in rollout.judged_turns]


def penalty(rollout: Rollout, config: RewardedConfig) -> float:
    """Return the sum of the penalties of all turns of an episode."""
    others = sum(_is_truncated(turn) for turn in rollout.all_turns[len(rollout.turns) :])
    return math.fsum(penalties(rollout, config)) + config.truncated_turn_penalty * others


def counted_turns(rollout: Rollout, config: RewardedConfig) -> np.ndarray:
    """Return a mask of the entries of `rollout.all_turns` that the loss counts, bool."""
    masked = [
        (config.mask_truncated_turns and _is_truncated(turn)) or (config.mask_malformed_turns and turn.malformed)
        for turn in rollout.judged_turns
    ]
    others = [config.mask_truncated_turns and _is_truncated(turn) for turn in rollout.all_turns[len(rollout.turns) :]]
    return ~np.concatenate([_of_entries(rollout, masked), np.array(others, np.bool_)])


def _is_truncated(turn: Turn) -> bool:
    """Return whether a turn ended because it reached the length limit, or because its episode was cut."""
    return turn.completion.finish == "length"


def _of_entries(rollout: Rollout, of_turns: Sequence[bool]) -> np.ndarray:
    return np.array(of_turns, np.bool_)[answer_numbers(rollout)]


def turn_rewards(rollout: Rollout, reward: float, config: RewardedConfig | None = None) -> np.ndarray:
    """Return the rewards of a rollout's K turns, `[K]` float64, which add up to `reward`.

    config: gives the penalties of turns; None: no turn has any. What else shaping has changed in `reward` is the last turn's.
    """
    if not rollout.turns:
        return np.zeros(0)
    earlier = np.array([turn.reward for turn in rollout.judged_turns[:-1]], np.float64)
    if config is not None:
        earlier -= penalties(rollout, config)[:-1]
    return np.array([*earlier, reward - math.fsum(earlier)], np.float64)


def returns_to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return G_k = sum_{j >= k} discount^(j - k) r_j, `[K]`."""
    returns = rewards.copy()
    for k in reversed(range(len(returns) - 1)):
        returns[k] += discount * returns[k + 1]
    return returns


def by_turn(returns: Sequence[np.ndarray]) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield for each k the episodes that have a turn k, `[M]`, and their returns from it on, `[M]`. returns: `[K]` of each."""
    for k in range(max(map(len, returns), default=0)):
        members = [i for i, of_episode in enumerate(returns) if len(of_episode) > k]
        yield members, np.array([returns[i][k] for i in members], np.float64)


def scored_returns(group: RolloutGroup, discount: float) -> list[np.ndarray]:
    """Return the unshaped returns from each turn k on, `[M]`, of the scored episodes that have a turn k."""
    scored = [rollout for rollout in group.rollouts if not rollout.failure]
    returns = [returns_to_go(turn_rewards(rollout, rollout.reward), discount) for rollout in scored]
    return [values for _, values in by_turn(returns)]


def turn_advantages(
    group: RolloutGroup,
    returns: Sequence[np.ndarray],
    of_episodes: Sequence[float] | np.ndarray,
    least: int,
    estimate: Estimator,
) -> list[np.ndarray]:
    """Return an advantage for each entry of each rollout's `turns`, `[N]`.

    returns: `[K]` of each rollout. of_episodes: the advantages of the episodes, `[G]`. They are also those of turns that fewer
    than `least` scored episodes reach. estimate: the algorithm's estimator, which gets the rollouts that have a turn.
    """
    found = [np.full(len(of_episode), advantage) for of_episode, advantage in zip(returns, of_episodes, strict=True)]
    for k, (members, values) in enumerate(by_turn(returns)):
        among = replace(group, rollouts=tuple(group.rollouts[i] for i in members))
        if sum(not rollout.failure for rollout in among.rollouts) >= least:
            for i, advantage in zip(members, estimate(among, values), strict=True):
                found[i][k] = advantage
    return [of_turns[answer_numbers(rollout)] for of_turns, rollout in zip(found, group.rollouts, strict=True)]


def with_token_rewards(sample: Sample, rollout: Rollout, rewards: np.ndarray) -> Sample:
    """Return a sample that has, as its advantages, the reward of each token, `[L]`: that of a turn at the turn's last token.

    The reward of a turn that the loss leaves out arrives with the last counted token before it; without one it has no effect.
    rewards: of turns, `[K]`.
    """
    at = np.zeros(len(sample.tokens), np.float64)
    end = len(sample.tokens) - len(rollout.tokens)
    for place, (turn, number) in enumerate(zip(rollout.turns, answer_numbers(rollout), strict=True)):
        end += len(turn.completion.tokens)
        is_answer = place == len(rollout.turns) - 1 or not turn.thinking
        if is_answer and len(counted := np.flatnonzero(sample.loss_mask[:end])):
            at[counted[-1]] += rewards[number]
        end += len(turn.observation)
    branches = tuple(_rewarded_at_its_end(branch) for branch in sample.branches)
    return replace(sample, advantages=at.astype(np.float32), branches=branches)


def _rewarded_at_its_end(branch: Sample) -> Sample:
    """Return another conversation of an episode with the episode's reward at its last counted token."""
    at = np.zeros(len(branch.tokens), np.float32)
    at[np.flatnonzero(branch.loss_mask)[-1:]] = branch.reward
    return replace(branch, advantages=at)
