"""RLOO: REINFORCE with a leave-one-out baseline (https://arxiv.org/abs/2402.14740).

    A_i = r_i - 1/(G-1) sum_{j != i} r_j        eq. 8; grpo.use_leave_one_out_baseline=true
    loss = - A_i log pi(y_t)                    eq. 4 for each token; loss_fn.disable_ppo_ratio=true

with grpo.normalize_rewards=false. The gradient of a sequence's log-prob is the sum of its tokens', so that per-token terms with
one advantage are the paper's. Left out: the paper's sum over a sequence; here tokens are averaged as `token_level_loss` says.
"""

from __future__ import annotations

import numpy as np
import torch


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """`[G]` rewards of one prompt -> `[G]` advantages, each against the mean of the others. Of a single reward: 0."""
    size = len(rewards)
    if size == 1:
        return np.zeros(1)
    return rewards - (rewards.sum() - rewards) / (size - 1)


def reinforce(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """A log pi, `[T]`: what REINFORCE makes larger."""
    return advantages * logprobs
