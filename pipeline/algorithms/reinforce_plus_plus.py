"""REINFORCE++ (https://arxiv.org/abs/2501.03262); grpo.adv_estimator.name=reinforce_plus_plus.

    A_t = r - beta sum_{s >= t} KL_s            the tokens of one answer; KL only with loss_fn.use_kl_in_reward
    A_t <- (A_t - mean) / std                   over all tokens of the step: pipeline/algorithms/standardize.py

REINFORCE++-baseline (adv_estimator.minus_baseline, NeMo-RL's default) subtracts the mean of the group from r first. beta is
loss_fn.reference_policy_kl_penalty. KL_s is estimated for the policy before the step's first update.

NeMo-RL takes only a token's own KL off its advantage; here it is the sum from that token on, as in the paper, since a token
also answers for what comes after it. Left out: discounting.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeline.algorithms.dr_grpo import centered
from pipeline.algorithms.gae import discounted_sums, rows, scattered
from pipeline.algorithms.kl import kl_in_reward
from pipeline.config import LossConfig
from pipeline.types import PackedBatch


def sequence_advantages(rewards: np.ndarray, minus_baseline: bool) -> np.ndarray:
    """`[G]` rewards of one prompt -> `[G]` advantages, not yet standardized."""
    return centered(rewards) if minus_baseline else rewards


def minus_kl_to_come(batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """`[T]`: the advantages less beta times the sum of KL from each token on."""
    kl = discounted_sums(rows(kl_in_reward(batch, config), batch), 1.0)
    return batch.advantages - config.reference_policy_kl_penalty * scattered(kl, batch)
