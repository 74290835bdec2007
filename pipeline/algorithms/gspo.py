"""GSPO: group sequence policy optimization (https://arxiv.org/abs/2507.18071); loss_fn.sequence_level_importance_ratios.

    s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|) = exp(1/|y_i| sum_t log pi(y_t) / pi_old(y_t))        eq. 7

takes the place of every token's own ratio in the clipped surrogate, eq. 5: a sequence is clipped as a whole. Its loss is a
mean over sequences, hence token_level_loss=false. Left out: GSPO-token (eq. 13), which differs only if the advantages of a
sequence's tokens do.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.reductions import per_token, sequence_means
from pipeline.types import PackedBatch


def sequence_log_ratios(log_ratios: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[T]` log r of tokens -> `[T]` log s of each one's sequence."""
    return per_token(sequence_means(log_ratios, batch), batch)
