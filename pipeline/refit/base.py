"""What the pipeline asks of a weight transfer from the train realm to the generate realm.

Both ends run at the same time, each on all ranks of its realm. A transfer that fails raises on every rank it can reach, and the
generate backend's version stays what it was.
"""

from __future__ import annotations

from typing import Protocol

from pipeline.generate.base import GenerateBackend
from pipeline.train.base import TrainBackend


class Refit(Protocol):
    def send(self, backend: TrainBackend) -> int:
        """Send all weights; the bytes that this rank sent."""

    def receive(self, backend: GenerateBackend, version: int) -> None:
        """Receive all weights into `backend`, which serves them as `version`."""
