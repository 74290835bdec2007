"""The critic's loss: squared error, bounded as the policy's is (PPO's implementation, https://arxiv.org/abs/2005.12729 sec. 3).

    loss = scale / 2 mean over tokens of max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2)

V, V_old and the return R are of what stands before a counted token, so V comes from the state after the token before it. Left
out: losses on a distribution of values.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.gae import values_before
from pipeline.algorithms.reductions import counted, masked_extreme, masked_share
from pipeline.config import ValueLossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


class ValueLoss:
    def __init__(self, config: ValueLossConfig):
        self._config = config

    def __call__(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        values, returns = values_before(outputs.values), batch.returns
        errors = (values - returns).square()
        is_clipped = torch.zeros_like(batch.loss_mask)
        if (most := self._config.cliprange) is not None:
            old = values_before(batch.old_values)
            clipped = (old + (values - old).clamp(-most, most) - returns).square()
            is_clipped = clipped > errors
            errors = torch.maximum(errors, clipped)
        loss = self._config.scale / 2 * masked_share(errors, batch, counts)
        with torch.no_grad():
            found = counted(values, batch)
            residuals = returns - found
            terms = torch.stack([returns, returns.square(), residuals, residuals.square()])
            metrics = {
                "values_mean": masked_share(found, batch, counts),
                "values_max": masked_extreme(found, batch, largest=True),
                "values_min": masked_extreme(found, batch, largest=False),
                "returns_mean": masked_share(returns, batch, counts),
                "value_clip_fraction": masked_share(is_clipped.to(found.dtype), batch, counts),
                "explained_variance_moments": torch.stack([masked_share(term, batch, counts) for term in terms]),
            }
        return LossOutput(loss, metrics)
