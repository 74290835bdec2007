"""The gradients of the FSDP2 backend's parameters: partial sums, norm, clipping, and the scale of losses in float16.

Losses are scaled in float16, whose smallest number is 6e-8, so that small gradients do not become 0. Gradients are divided by
the scale before their norm is computed. If one overflows, the step is computed again with half of the scale, so no update is
lost. A gradient that is not finite at the smallest scale either is no overflow. The constants are torch.amp.GradScaler's, which
skips such a step. The smallest scale is Megatron-LM's (megatron/training/arguments.py, --min-loss-scale).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pipeline.train.shards import is_first_holder, local

CHUNK = 1 << 22
"""The number of elements that are converted to float64 at a time."""


def squared_norm(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of all squares, [] float64 on the device.

    Squares and sums are float64. A float32 sum on a CPU is off by 0.3% at 28 million elements, since each thread adds to a few
    sums in turn.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for chunk in tensor.reshape(-1).split(CHUNK):
            exact = chunk.double()
            total += torch.dot(exact, exact).to(device)
    return total


def sum_over_groups(tensors: Iterable[tuple[torch.Tensor, dist.ProcessGroup]], device: torch.device | None = None) -> None:
    """Sum each tensor over the ranks of its group, in place, by one collective for each group.

    device: of the collectives; None: that of the tensors.
    """
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for tensor, group in tensors:
        by_group.setdefault(group, []).append(tensor)
    for group, parts in by_group.items():
        flat = torch.cat([part.flatten() for part in parts]).to(device)
        dist.all_reduce(flat, group=group)
        for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


class Gradients:
    """The gradients of the trained parameters, by name."""

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        partial: Mapping[str, dist.ProcessGroup],
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        """partial: {parameter: group whose ranks each have only a part of its gradient's sum}. group: the train component."""
        self._trained, self._partial = trained, partial
        self._group, self._device = group, device

    def local(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each gradient, by name."""
        return {name: local(p.grad) for name, p in self._trained.items() if p.grad is not None}

    def sum_partial(self) -> None:
        """Sum the partial gradients over their groups. Once per step is enough."""
        gradients = self.local()
        sum_over_groups(((gradients[name], group) for name, group in self._partial.items()), self._device)

    def divide(self, factor: float) -> None:
        """Divide the gradients by a factor."""
        if factor != 1:
            torch._foreach_div_(list(self.local().values()), factor)  # pyright: ignore[reportPrivateImportUsage]

    def norm(self) -> float:
        """Return the norm of the whole gradient, summed in float64. Collective over the component."""
        squared = self._squared_norm()
        dist.all_reduce(squared, group=self._group)
        return math.sqrt(squared.item())

    def _squared_norm(self) -> torch.Tensor:
        """Return this rank's share of the squared norm, [] float64."""
        rank = self._group.rank()
        counted = [g for name, g in self.local().items() if g.numel() and is_first_holder(self._trained[name], rank)]
        return squared_norm(counted, self._device)

    def clip(self, norm: float, limit: float | None) -> None:
        """Scale the gradients so that their norm is at most `limit` (None: no limit). norm: the norm of the whole gradient."""
        if limit is not None and norm > limit:
            gradients = list(self.local().values())
            torch._foreach_mul_(gradients, limit / norm)  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it


# ---- the loss scale of float16 ----------------------------------------------------------------------------------------------


INITIAL = 2.0**16
GROWTH_STEPS = 2000
"""The number of steps without overflow after which the scale doubles."""
SMALLEST = 1.0


class LossScale:
    """The factor of a model's losses: a power of two in float16, and 1 otherwise."""

    def __init__(self, precision: str):
        self._dynamic = precision == "float16"
        self.factor = INITIAL if self._dynamic else SMALLEST
        self._steps = 0  # since the last change

    def finite_norm(self, differentiate: Callable[[], float], device: torch.device) -> float:
        """Return the norm of the gradient, after halving the scale as often as the gradient overflows.

        differentiate: a function that computes the gradient with the current scale, and returns its norm. Each call of it draws
        the same random numbers. Raises FloatingPointError if the gradient is not finite with the smallest scale either.
        """
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        states = [generator.get_state() for generator in generators]

        def again(factor: float) -> float:
            self.factor = factor
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            return differentiate()

        norm, first = differentiate(), self.factor
        factor, overflows = first, False  # until a pass with the smallest scale is finite
        while not math.isfinite(norm) and factor > SMALLEST:
            factor = factor / 2
            norm = again(factor)
            if not (math.isfinite(norm) or overflows):
                overflows = math.isfinite(again(SMALLEST))
                if not overflows:
                    break
        if not math.isfinite(norm):
            self.factor = first
            raise FloatingPointError(f"the gradient's norm is {norm}; the step was not taken")
        self._steps = 0 if factor < first else self._steps
        return norm

    def count_step(self) -> None:
        """Count a step without overflow. In float16, the scale doubles after GROWTH_STEPS of them."""
        self._steps += 1
        if self._dynamic and self._steps >= GROWTH_STEPS:
            self.factor, self._steps = self.factor * 2, 0

    def record(self) -> list[float] | None:
        """Return the state for a checkpoint, as JSON values; None in other precisions than float16."""
        return [self.factor, self._steps] if self._dynamic else None

    def restore(self, record: Any) -> None:
        """Continue with the state of a checkpoint, as `record` returned it. In other precisions than float16, do nothing.

        record None: the checkpoint is of another precision or has no such state, and the scale stays as it is.
        """
        if self._dynamic and record is not None:
            self.factor, self._steps = float(record[0]), int(record[1])
