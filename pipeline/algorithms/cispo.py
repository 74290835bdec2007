"""CISPO: clipped importance-sampling weights (MiniMax-M1, https://arxiv.org/abs/2506.13585 eq. 4); loss_fn.use_cispo.

    sg(clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)) A log pi        r = pi / pi_old

The bound weighs a token's gradient and never takes it away, as the clipped surrogate's does. The paper has no lower bound:
ratio_clip_min=1. Left out: its masks on tokens (eq. 7).
"""

from __future__ import annotations

import torch

from pipeline.config import LossConfig


def cispo(logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """`[T]`: what the policy's loss makes larger."""
    weight = ratio.detach().clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    return weight * advantages * logprobs


def is_bounded(ratio: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """`[T]` bool: where the weight is a bound."""
    return (ratio > 1 + config.ratio_clip_max) | (ratio < 1 - config.ratio_clip_min)
