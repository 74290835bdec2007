"""What the pipeline asks of a generation backend: an engine that is stepped from outside.

Every rank of an engine (its tensor-parallel peers) makes the same calls with the same arguments in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from pipeline.types import Completion, Request


class GenerateBackend(Protocol):
    def add(self, requests: list[Request]) -> None:
        """Queue requests. Raises ValueError, naming the request, if its prompt leaves no room for one new token."""

    def step(self) -> list[Completion]:
        """Advance every running request; the completions that ended. Returns [] at once when there is nothing to do."""

    @property
    def pending(self) -> int:
        """Requests that have not ended."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights, by Hugging Face name; afterwards completions carry `version` and no cached prefix of the old
        weights is used. Each tensor may be kept: the caller does not reuse its memory. On an error the old version number
        stays, and the engine must not be used again before a load that succeeds."""
