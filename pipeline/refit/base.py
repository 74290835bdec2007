"""What the pipeline asks of a weight transfer from the train component to the generate component.

Both ends run at the same time, each on all ranks of its component. A transfer that fails raises on every rank it can reach; the
version that is served changes only with `WeightUpdate.commit`, which rank 0 orders once all ranks are done and their digests
agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from pipeline.boxes import Region
from pipeline.generate.base import WeightUpdate
from pipeline.refit.tables import RankPlan
from pipeline.train.base import TrainBackend

NOTHING = np.zeros(0, np.int32)


class RefitReport(msgspec.Struct):
    """What one rank did in one refit. Seconds of its main thread; on a GPU of the stream that it waited for."""

    sent: int = 0  # bytes, on the wire
    received: int = 0
    pack: float = 0.0  # gathering what is sent, casts included
    wire: float = 0.0  # waiting for messages
    apply: float = 0.0  # writing what came, and finishing units
    digest: float = 0.0
    total: float = 0.0
    keys: np.ndarray = NOTHING  # [k] int32, of the plan
    hashes: np.ndarray = NOTHING  # [k] uint64: what this rank has of each, added up


class Commit(msgspec.Struct):
    """New weights are to be served."""

    version: int
    recompute_kv_cache: bool = True  # of requests that run: made anew, else kept as the old weights made them


class Refit(Protocol):
    def send(self, backend: TrainBackend) -> RefitReport:
        """Send this rank's share of all weights."""

    def receive(self, update: WeightUpdate) -> RefitReport:
        """Write all of this rank's weights through `update`, short of its commit."""


@runtime_checkable
class PreparedRefit(Refit, Protocol):
    """A refit that follows a plan from rank 0."""

    def prepare(self, regions: Sequence[Region], units: Sequence[str] | None, plan: RankPlan) -> None:
        """Send or receive by `plan` from now on. units: None on a train rank."""
