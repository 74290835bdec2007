"""What top-k and top-p sampling leave of a distribution, with the vocabulary cut over ranks.

Log-probs must be of the distribution that tokens were drawn from. So the engine's filters are applied to the logits here too,
in vLLM's order and NeMo-RL's (nemo_rl/algorithms/logits_sampling_utils.py): temperature, then the k largest logits, then of the
softmax of those the fewest, from the most likely on, whose probabilities add up to p. Both keep all logits above some floor, so
that a number per row says which. The floor is found by bisection over all float32 numbers: each of the 32 passes needs one sum
per row, which ranks that share the vocabulary add up; nothing is sorted or gathered.

Logits that are equal to the floor are all kept. vLLM keeps some of them, which ones depends on its kernel; so no token that it
drew is lost to a tie. At least one token is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.config import GenerationConfig

_INFINITY = 0x7F800000  # the bits of float32's


@dataclass(frozen=True, slots=True)
class Truncation:
    top_k: int | None  # None: no limit
    top_p: float

    @classmethod
    def of(cls, generation: GenerationConfig) -> Truncation | None:
        """None if tokens are drawn from the whole distribution."""
        if generation.top_k is None and generation.top_p == 1.0:
            return None
        return cls(generation.top_k, generation.top_p)

    def floor(self, logits: torch.Tensor, normalizer: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The smallest logit of each row that is kept, `[rows]`; -inf if all are.

        logits [rows, V] float32: this rank's part of the vocabulary; normalizer [rows]: log sum exp over the whole of it.
        """

        def total(values: torch.Tensor) -> torch.Tensor:
            summed = values.sum(1)
            if group is not None:
                dist.all_reduce(summed, group=group)
            return summed

        floor = torch.full_like(normalizer, -torch.inf)
        if self.top_k is not None:
            floor = _largest(lambda least: total(logits >= least[:, None]) >= self.top_k, floor)
        if self.top_p < 1.0:
            probabilities = (logits - normalizer[:, None]).exp_()

            def mass(least: torch.Tensor) -> torch.Tensor:
                return total(torch.where(logits >= least[:, None], probabilities, 0.0))

            enough = self.top_p * mass(floor)
            floor = _largest(lambda least: mass(least) >= enough, floor)
        return floor


def _largest(holds: Callable[[torch.Tensor], torch.Tensor], smallest: torch.Tensor) -> torch.Tensor:
    """The largest float32 of which `holds` is true, for each row; `smallest` [rows] if none above it is.

    holds: [rows] -> [rows] bool, false from some number on, and of infinity.
    """
    below, above = float_order(smallest).long(), torch.full_like(smallest, _INFINITY, dtype=torch.int64)
    for _ in range(32):
        middle = (below + above) >> 1
        true = holds(from_float_order(middle.int()))
        below, above = torch.where(true, middle, below), torch.where(true, above, middle)
    return from_float_order(below.int())


def float_order(values: torch.Tensor) -> torch.Tensor:
    """int32 that sort as the float32 `values` do; -0.0 comes right before 0.0."""
    return _flipped(values.view(torch.int32))


def from_float_order(places: torch.Tensor) -> torch.Tensor:
    return _flipped(places).view(torch.float32)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Its own inverse: all bits but the sign's, of what is negative."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
