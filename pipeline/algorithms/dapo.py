"""DAPO: decoupled clip and dynamic sampling (https://arxiv.org/abs/2503.14476). Its four changes to GRPO, and their keys:

    clip-higher       ratio_clip_max above ratio_clip_min (surrogate.py), eq. 10
    dynamic sampling  a group is trained on if its rewards vary, others are sampled anew, eq. 11: `varies`
    token-level loss  token_level_loss=true (reductions.py), eq. 12
    overlong rewards  overlong_filtering leaves cut answers out of the loss; `soft_overlong_penalty` is eq. 13

Dynamic sampling looks at rewards before they are shaped, as NeMo-RL does: lengths that vary are no reason to train on a group
that is all right or all wrong. Left out: the paper keeps groups by accuracy strictly between 0 and 1, which is the same for
rewards of 0 and 1.
"""

from __future__ import annotations

import numpy as np

ROUNDING = 1e-5  # relative: what a model gives to the same answer in different company, in float32, is nearer than this


def varies(rewards: np.ndarray) -> bool:
    """Whether the `[G]` rewards of one prompt have anything to tell apart, other than rounding."""
    return len(rewards) > 1 and bool(np.ptp(rewards) > ROUNDING * max(1.0, np.abs(rewards).max()))


def soft_overlong_penalty(lengths: np.ndarray, longest: int, buffer: int, penalty: float) -> np.ndarray:
    """`[G]` lengths of answers -> `[G]` what is added to their rewards: 0 up to longest - buffer tokens, then falling in a line
    through -penalty at `longest`. It falls on beyond, as in NeMo-RL and verl; eq. 13 stays at -1 there."""
    return -penalty * ((lengths - (longest - buffer)) / buffer).clip(0)
