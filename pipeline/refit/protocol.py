"""The Protocol of a weight transfer from the train ranks to the generate ranks.

Both ends run at the same time, each on all ranks of its component. A failed transfer raises on every rank that it can reach.
The served version changes only with `WeightUpdate.commit`, which rank 0 calls once all ranks are done and their digests agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from pipeline.boxes import Region
from pipeline.generate.generate_backend import WeightUpdate
from pipeline.refit.tables import RankPlan
from pipeline.train.train_backend import TrainBackend

NOTHING = np.zeros(0, np.int32)


class RefitReport(msgspec.Struct):
    """Bytes and times of one rank in a refit. Times are seconds of its main thread, or of the GPU stream that it waited for."""

    sent: int = 0  # bytes on the network
    received: int = 0
    pack: float = 0.0  # gathering and casting the items to send
    wire: float = 0.0  # waiting for messages
    apply: float = 0.0  # writing received items, and finishing units
    digest: float = 0.0
    total: float = 0.0
    keys: np.ndarray = NOTHING  # [k] int32: digest keys of the plan
    hashes: np.ndarray = NOTHING  # [k] uint64: sum of the hashes of this rank's parts of each key


class Commit(msgspec.Struct):
    """The command to serve new weights."""

    version: int
    recompute_kv_cache: bool = True  # of running requests; False: keep what the old weights computed


class Refit(Protocol):
    """A weight transfer, as both ends see it."""

    def send(self, backend: TrainBackend) -> RefitReport:
        """Send this rank's share of all weights."""
        ...

    def receive(self, update: WeightUpdate) -> RefitReport:
        """Write all of this rank's weights through `update`, without committing it."""
        ...


@runtime_checkable
class PreparedRefit(Refit, Protocol):
    """A refit that follows a plan from rank 0."""

    def prepare(self, regions: Sequence[Region], units: Sequence[str] | None, plan: RankPlan) -> None:
        """Send or receive by `plan` from now on.

        regions: the regions of this rank's table, in its order. units: the unit of each region; None on a train rank.
        """
