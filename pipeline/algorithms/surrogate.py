"""PPO's clipped surrogate (https://arxiv.org/abs/1707.06347 eq. 7), which GRPO, DAPO and GSPO share.

    min(r A, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A)        r = pi / pi_old

Different bounds are DAPO's clip-higher. With ratio_clip_c (dual clip, https://arxiv.org/abs/1912.09729 eq. 5) it is at least
c A where A < 0, so that a token that became far more likely and should not have does not outweigh all others. Left out: PPO's
penalty on KL(pi_old || pi), eq. 8.
"""

from __future__ import annotations

import torch

from pipeline.config import LossConfig


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """`[T]`: what the policy's loss makes larger."""
    clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if config.ratio_clip_c is None:
        return surrogate
    return torch.where(advantages < 0, torch.maximum(surrogate, config.ratio_clip_c * advantages), surrogate)


def is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """`[T]` bool: where a bound is what counts, so the token has no gradient."""
    above = (ratio > 1 + config.ratio_clip_max) & (advantages > 0)
    below = (ratio < 1 - config.ratio_clip_min) & (advantages < 0)
    if config.ratio_clip_c is None:
        return above | below
    return above | below | ((ratio > config.ratio_clip_c) & (advantages < 0))
