"""Truncate distributions as top-k and top-p sampling do, with the vocabulary cut over ranks.

Log-probs must be of the distribution from which tokens were sampled. So the engine's filters are applied to the logits here,
in the order of vLLM and NeMo-RL (nemo_rl/algorithms/logits_sampling_utils.py): temperature, then the k largest logits, then the
smallest set of the most likely of these whose probabilities sum to p. Both filters keep all logits that are not below a floor,
so one number per row defines them. The floor is found by bisection over all float32 numbers: each of the 32 passes needs one
sum per row over the ranks that share the vocabulary; nothing is sorted or gathered.

All logits that equal the floor are kept. vLLM keeps some of them, depending on its kernel, so no token that vLLM sampled is
truncated here. At least one token is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.config import GenerationConfig

_INFINITY = 0x7F800000  # the bits of float32 infinity


@dataclass(frozen=True, slots=True)
class Truncation:
    """The filters of a policy's sampling."""

    top_k: int | None  # None: no limit
    top_p: float

    @classmethod
    def of(cls, generation: GenerationConfig) -> Truncation | None:
        """Return the filters; None if tokens are sampled from the whole distribution."""
        if generation.top_k is None and generation.top_p == 1.0:
            return None
        return cls(generation.top_k, generation.top_p)

    def floor(self, logits: torch.Tensor, normalizer: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the smallest kept logit of each row, [rows] float32; -inf if all are kept.

        logits [rows, V] float32: this rank's part of the vocabulary; normalizer [rows]: log sum exp over the whole vocabulary.
        """

        def total(values: torch.Tensor) -> torch.Tensor:
            summed = values.sum(1)
            if group is not None:
                dist.all_reduce(summed, group=group)
            return summed

        floor = torch.full_like(normalizer, -torch.inf)
        if (top_k := self.top_k) is not None:
            floor = _largest(lambda least: total(logits >= least[:, None]) >= top_k, floor)
        if self.top_p < 1.0:
            probabilities = (logits - normalizer[:, None]).exp_()

            def mass(least: torch.Tensor) -> torch.Tensor:
                return total(torch.where(logits >= least[:, None], probabilities, 0.0))

            enough = self.top_p * mass(floor)
            floor = _largest(lambda least: mass(least) >= enough, floor)
        return floor


def _largest(holds: Callable[[torch.Tensor], torch.Tensor], smallest: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the largest float32 for which `holds` is true; `smallest` [rows] if there is none above it.

    holds: a function [rows] -> [rows] bool. In each row it is true up to some number, and false above it and for infinity.
    """
    below, above = float_order(smallest).long(), torch.full_like(smallest, _INFINITY, dtype=torch.int64)
    for _ in range(32):
        middle = (below + above) >> 1
        true = holds(from_float_order(middle.int()))
        below, above = torch.where(true, middle, below), torch.where(true, above, middle)
    return from_float_order(below.int())


def float_order(values: torch.Tensor) -> torch.Tensor:
    """Map float32 `values` to int32 that sort in the same order; -0.0 comes right before 0.0."""
    return _flip(values.view(torch.int32))


def from_float_order(keys: torch.Tensor) -> torch.Tensor:
    """Map int32 keys of `float_order` back to their float32 values."""
    return _flip(keys).view(torch.float32)


def _flip(bits: torch.Tensor) -> torch.Tensor:
    """Flip all bits except the sign of negative numbers. This is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
