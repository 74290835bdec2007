"""The result of a measurement, and the place where parts measure."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Numbers = dict[str, float | None]
"""By name with unit. None: unknown on this device."""


@dataclass(frozen=True)
class Place:
    """The device, the size and the folder with which parts measure."""

    device: str  # cuda or cpu
    size: str  # full or tiny
    gpus: int
    folder: Path  # for files of this check

    @property
    def full(self) -> bool:
        return self.size == "full"

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds of a call, until the GPU has done its work."""
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


@dataclass
class Measurement:
    numbers: Numbers = field(default_factory=dict)
    note: str = ""
    problems: list[str] = field(default_factory=list)  # none: it is as it should be
    details: dict[str, Any] = field(default_factory=dict)  # for gpu_check.json alone

    def limit(self, name: str, value: float, most: float) -> None:
        """Take a number, and a problem if it is not within its limit."""
        self.numbers[name] = value
        if not value <= most:  # NaN too
            self.problems.append(f"{name}: {value:.3g}, more than {most:.3g}")

    def attempt(self, cases: Mapping[str, Callable[[], None]]) -> None:
        """Run all cases; an error is a problem of its own case."""
        for name, case in cases.items():
            try:
                case()
            except Exception as error:
                traceback.print_exc()
                self.problems.append(f"{name}: {said(error)}")


def said(error: Exception) -> str:
    """Return an error in one line. That of another process ends with its last line."""
    lines = str(error).splitlines() or [""]
    line = lines[0] or lines[-1] or next(filter(None, reversed(lines)), "")
    return f"{type(error).__name__}: {line}"[:300]
