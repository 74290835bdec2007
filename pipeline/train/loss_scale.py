"""Scale losses in float16, whose smallest number is 6e-8, so that small gradients do not become 0.

Gradients are divided by the scale before their norm is computed. If one overflows, the step is computed again with half of the
scale, so no update is lost. A gradient that is not finite at the smallest scale either is no overflow. The constants are those
of torch.amp.GradScaler, which skips such a step. The smallest scale is Megatron-LM's (megatron/training/arguments.py,
--min-loss-scale).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

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
