"""Advantages of a group of rollouts of one prompt, on plain numpy arrays."""

from __future__ import annotations

import numpy as np

from pipeline.algorithms.dapo import varies
from pipeline.algorithms.dr_grpo import centered
from pipeline.algorithms.rloo import leave_one_out

EPSILON = 1e-6  # keeps the division finite, as NeMo-RL's; a group without variance is given no advantage at all


def group_advantages(rewards: np.ndarray, use_leave_one_out: bool, normalize: bool) -> np.ndarray:
    """A_i = (r_i - b_i) / s_i for the `[G]` float64 rewards of one prompt.

    Baseline b_i: the mean of the group (GRPO, https://arxiv.org/abs/2402.03300), or of the others (RLOO). Scale s_i, if
    `normalize`: the unbiased standard deviation of the same rewards that made the baseline. With fewer than two of them, or
    where they do not vary, the advantage stays undivided.

    The deviation of the others can be much smaller than the distance from them: with rewards that are not 0 or 1, as a model's,
    leave_one_out and normalize together make advantages without bound. Of the whole group an advantage is below sqrt(G).
    """
    rewards = np.asarray(rewards, np.float64)
    if not varies(rewards):
        return np.zeros(len(rewards))
    advantages = leave_one_out(rewards) if use_leave_one_out else centered(rewards)
    if not normalize:
        return advantages
    deviations = _deviations(rewards, use_leave_one_out)
    return np.where(deviations > 0, advantages / (deviations + EPSILON), advantages)


def _deviations(rewards: np.ndarray, use_leave_one_out: bool) -> np.ndarray:
    """`[G]`: of the rewards that made each one's baseline; 0 of fewer than two."""
    behind = [np.delete(rewards, i) if use_leave_one_out else rewards for i in range(len(rewards))]
    return np.array([of.std(ddof=1) if varies(of) else 0.0 for of in behind])  # that of equal numbers may round to above 0
