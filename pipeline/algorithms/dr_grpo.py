"""Dr. GRPO: GRPO done right (https://arxiv.org/abs/2503.20783).

    A_i = r_i - mean(r_1 .. r_G)        eq. 4 without the standard deviation; grpo.normalize_rewards=false

Dividing by the group's deviation weighs easy and hard prompts more than others, and dividing a sequence's loss by its length
weighs short right answers and long wrong ones less: hence loss_fn.token_level_loss=true besides.

Left out: the paper divides a step's sum of losses by a constant, the longest possible answer times the number of sequences.
Here it is the number of counted tokens, so that the gradient's size does not follow that constant; the direction is the same.
"""

from __future__ import annotations

import numpy as np


def centered(rewards: np.ndarray) -> np.ndarray:
    """`[G]` rewards of one prompt -> `[G]` advantages."""
    return rewards - rewards.mean()
