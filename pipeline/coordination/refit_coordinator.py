"""Coordinate refits on rank 0: plan once, order each transfer, compare digests, commit, and report the cost.

Generate ranks get a new version only after every rank is done and, with `refit_cfg.digest`, after every one has proved to hold
what the train ranks hold. Any failure before that raises here, and the old version stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import msgspec

from pipeline.config import PRECISIONS, Recipe, ahead
from pipeline.job.world import WorkerGroups
from pipeline.refit.digest import RefitError, compare
from pipeline.refit.plan import schedule
from pipeline.refit.protocol import Commit, RefitReport
from pipeline.refit.tables import RefitPlan
from pipeline.roles import GenerateRole, TrainRole
from pipeline.rpc import RpcGroup

logger = logging.getLogger(__name__)


class RefitCoordinator:
    """Rank 0's refits. Call it to serve the train ranks' current weights."""

    def __init__(
        self,
        recipe: Recipe,
        workers: WorkerGroups,
        train: RpcGroup[TrainRole],
        generate: RpcGroup[GenerateRole],
        shapes: Mapping[str, tuple[int, ...]],
        nodes: Mapping[int, str],
    ):
        """Plan the transfer, unless the transport is the broadcast.

        shapes: of all tensors on disk. nodes: of all ranks. Raises ValueError if the train ranks do not hold what the generate
        ranks need.
        """
        self._workers, self._train, self._generate = workers, train, generate
        self._network = recipe.cluster.network
        self._nodes = nodes
        self._names = list(shapes)
        self._digest = recipe.policy.generation.refit_cfg.digest
        self.incremental = recipe.policy.generation.refit_transport == "delta"  # engines must keep their weights between refits
        self._recompute = ahead(recipe).recompute_kv_cache_after_weight_updates
        self.version: int | None = None  # the version that the generate ranks serve
        self._plan = None
        if recipe.policy.generation.refit_transport != "broadcast":
            self._plan = self._plan_transfer(recipe, shapes)

    def _plan_transfer(self, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> RefitPlan:
        wanted = self._generate.call(GenerateRole.layout)
        held = self._train.call(TrainRole.layout).result()
        agreed = schedule(
            dict(zip(self._workers.train, held, strict=True)),
            dict(zip(self._workers.generate, wanted.result(), strict=True)),
            self._workers.engines,
            shapes,
            PRECISIONS[recipe.policy.precision],
            recipe.policy.generation.refit_cfg.bucket_bytes,
            self._nodes,
            self._network,
        ).plan()
        taken = self._generate.scatter(GenerateRole.prepare_refit, [agreed.ranks[rank] for rank in self._workers.generate])
        self._train.scatter(TrainRole.prepare_refit, [agreed.ranks[rank] for rank in self._workers.train]).result()
        taken.result()
        return msgspec.structs.replace(agreed, ranks={})  # drop the ranks' parts, which are large; each rank has its own

    def __call__(self, version: int) -> dict[str, float]:
        """Serve the current weights as `version`, and return metrics of the cost. Raises RefitError if a digest differs."""
        start = time.perf_counter()
        receiving = self._generate.call(GenerateRole.receive)
        sent = dict(zip(self._workers.train, self._train.call(TrainRole.send).result(), strict=True))
        received = dict(zip(self._workers.generate, receiving.result(), strict=True))
        if self._plan is not None and self._digest:
            try:
                compare(self._plan, self._names, sent, received, version)
            except RefitError as error:
                kept = "no version is served" if self.version is None else f"version {self.version} stays"
                raise RefitError(f"refit to version {version} failed, {kept}: {error}") from None
        self._generate.call(GenerateRole.commit, Commit(version, self._recompute)).result()
        self.version = version
        return self._measure(sent, received, time.perf_counter() - start)

    def _measure(self, sent: dict[int, RefitReport], received: dict[int, RefitReport], seconds: float) -> dict[str, float]:
        """Return metrics: bytes, where the time went, and the busiest rank's rate relative to the configured network.

        Ranks that share GPUs do not refit over that network; for them the ratio compares their own path with it.
        """
        every = [*sent.values(), *received.values()]
        longest = max(report.total for report in every)
        pack = max(report.pack for report in sent.values())
        apply = max(report.apply for report in received.values())
        digest = max(report.digest for report in every)
        parts = {
            "pack": pack,
            "apply": apply,
            "wire": max(0.0, longest - max(pack, apply) - digest),  # time that neither end's own work explains
            "pause": seconds - longest,  # before the slowest rank begins, and after it ends
        }
        busiest = max(report.received for report in received.values())
        one_node = len(set(self._nodes.values())) == 1
        rate = self._network.node_gb_per_s if one_node else self._network.nic_gb_per_s
        bound = max(parts, key=lambda part: parts[part])
        logger.info(f"refit: {busiest / 1e9:.3g} GB to the busiest rank in {seconds:.3g} s, bound by {bound}")
        return {
            "refit/bytes_sent": float(sum(report.sent for report in every)),
            "refit/bytes_received_max": float(busiest),
            **{f"time/refit_{name}": value for name, value in parts.items()},
            "time/refit_digest": digest,
            "throughput/refit_gb_per_s": busiest / seconds / 1e9,
            "throughput/refit_efficiency": busiest / (rate * 1e9) / seconds,
        }
