"""Refit by plan: every rank sends and receives exactly the bytes that the plan assigns to it, point to point.

A train rank gathers its items in the transfer dtype. A generate rank writes them to its engine's tensors, and finishes a unit
once all ranks of the engine have all of it. `prepare` computes once what stays the same from one refit to the next.

`plan.py` makes the plan. Rank 0 compares the digests of both ends, which are in their reports (`digest.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from pipeline.boxes import Region
from pipeline.config import RefitConfig
from pipeline.generate.generate_backend import WeightUpdate
from pipeline.job.world import World
from pipeline.refit.delta import DeltaBases, DeltaEncoding
from pipeline.refit.endpoints import ReceiveEndpoint, SendEndpoint
from pipeline.refit.full import FullEncoding
from pipeline.refit.protocol import NOTHING, PreparedRefit, RefitReport
from pipeline.refit.shared_memory import share_staging
from pipeline.refit.tables import RankPlan
from pipeline.refit.transfer import PeerChannel, StageTimer, run
from pipeline.train.train_backend import TrainBackend


class PlannedRefit(PreparedRefit):
    """A Refit that follows a RankPlan."""

    def __init__(self, world: World, config: RefitConfig, precision: torch.dtype, transport: str, ipc: bool = False):
        """Set up a refit without a plan; `prepare` sets the plan.

        precision: the policy's. transport: "planned", or "delta" to send only the entries that changed since the last refit.
        ipc: receivers map the staging memory of senders on their node, if possible, and read it in place.
        """
        self._world = world
        self._config = config
        self._precision = precision
        self._transport = transport
        self._ipc = ipc
        self._plan: RankPlan
        self._bases: DeltaBases
        self._sends: SendEndpoint
        self._receives: ReceiveEndpoint

    def prepare(self, regions: Sequence[Region], units: Sequence[str] | None, plan: RankPlan) -> None:
        """Prepare to send or receive by a plan.

        regions: the regions of this rank's table, in its order. units: the unit of each region; None on a train rank.
        """
        settings = (regions, self._precision, self._world.device, self._config.digest)
        self._plan = plan
        self._bases = DeltaBases()
        self._sends = SendEndpoint(plan, *settings)
        self._receives = ReceiveEndpoint(plan, units or (), *settings)
        if self._ipc:
            share_staging(self._world, self._sends, self._receives)
        else:
            self._sends.allocate(1 if self._sends.relays else 2)
            self._receives.allocate(2)

    @override
    def send(self, backend: TrainBackend) -> RefitReport:
        self._sends.bind(backend)
        return self._transfer()

    @override
    def receive(self, update: WeightUpdate) -> RefitReport:
        self._receives.bind(update)
        return self._transfer()

    @torch.no_grad()
    def _transfer(self) -> RefitReport:
        endpoints = (self._sends, self._receives)
        for endpoint in endpoints:
            if endpoint.digest:
                endpoint.digest.clear()
        timer = StageTimer(self._world.device)
        channel = PeerChannel(self._world, self._sends.mapped_peers, self._receives.mapped_peers)
        if self._transport == "delta":
            run(self._world, channel, self._plan, DeltaEncoding(channel, *endpoints, self._bases, timer), timer)
        else:
            run(self._world, channel, self._plan, FullEncoding(*endpoints, timer), timer)
        keys, hashes = NOTHING, NOTHING
        if self._config.digest:
            endpoint = self._receives if len(self._receives.items) else self._sends
            assert endpoint.digest is not None
            keys, hashes = endpoint.digest.result()
            timer.lap("digest")
        report = RefitReport(sent=channel.sent, received=channel.received, keys=keys, hashes=hashes, **timer.seconds())
        self._bases.done()
        return report
