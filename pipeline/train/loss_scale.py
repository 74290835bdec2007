"""Scale losses in float16, whose smallest number is 6e-8, so that small gradients do not become 0.

Gradients are divided by the scale before their norm is computed. If one overflows, the step is computed again with half of the
scale, so no update is lost. The constants are those of torch.amp.GradScaler, which skips such a step. The smallest scale is
Megatron-LM's (megatron/training/arguments.py, --min-loss-scale).
"""

from __future__ import annotations

from typing import Any

INITIAL = 2.0**16
GROWTH_STEPS = 2000
"""Steps without overflow after which the scale doubles."""
SMALLEST = 1.0


class LossScale:
    """The factor of a model's losses: a power of two in float16, and 1 otherwise."""

    def __init__(self, precision: str):
        self._dynamic = precision == "float16"
        self.factor = INITIAL if self._dynamic else SMALLEST
        self._steps = 0  # since the last change

    def overflowed(self) -> bool:
        """Halve the scale after an overflow, and return whether to compute the step again."""
        if self.factor <= SMALLEST:
            return False
        self.factor, self._steps = self.factor / 2, 0
        return True

    def stepped(self) -> None:
        """Count a step without overflow."""
        self._steps += 1
        if self._dynamic and self._steps >= GROWTH_STEPS:
            self.factor, self._steps = self.factor * 2, 0

    def record(self) -> list[float]:
        """Return the state for a checkpoint, as JSON values."""
        return [self.factor, self._steps]

    def restore(self, record: Any) -> None:
        """Continue with the state of a checkpoint; None: of a model in another precision."""
        if self._dynamic and record is not None:
            self.factor, self._steps = float(record[0]), int(record[1])
