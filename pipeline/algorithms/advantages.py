"""Advantages of a group of rollouts of one prompt, on plain numpy arrays."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6  # keeps the division finite, as NeMo-RL's; a group without variance is given no advantage at all


def group_advantages(rewards: np.ndarray, leave_one_out: bool, normalize: bool) -> np.ndarray:
    """A_i = (r_i - b_i) / s_i for the `[G]` float64 rewards of one prompt.

    Baseline b_i: the mean of the group (GRPO, https://arxiv.org/abs/2402.03300), or of the others (leave-one-out, RLOO,
    https://arxiv.org/abs/2402.14740). Scale s_i, if `normalize`: the unbiased standard deviation of the same rewards that made
    the baseline. With fewer than two of them, or where they do not vary, the advantage stays undivided.
    """
    rewards = np.asarray(rewards, np.float64)
    size = len(rewards)
    if size == 1:
        return np.zeros(1) if leave_one_out else rewards - rewards
    if not leave_one_out:
        advantages = rewards - rewards.mean()
        deviation = np.full(size, rewards.std(ddof=1))
    else:
        others = np.stack([np.delete(rewards, i) for i in range(size)])  # [G, G-1]
        advantages = rewards - others.mean(1)
        deviation = others.std(1, ddof=1) if size > 2 else np.zeros(size)
    if not normalize:
        return advantages
    return np.where(deviation > 0, advantages / (deviation + EPSILON), advantages)
