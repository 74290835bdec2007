"""Coordinate refits on rank 0: plan once, order each transfer, compare digests, commit, and report the cost.

Generate ranks serve a new version only after every rank is done and, with `refit_cfg.digest`, after digests have proved that
every rank holds the train ranks' values. Any failure before that raises here, and the old version stays.
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

        shapes: of all tensors on disk. nodes: rank -> its node. Raises ValueError if the train ranks do not hold all boxes that
        the generate ranks need.
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
        generate_layouts = self._generate.call(GenerateRole.layout)
        train_layouts = self._train.call(TrainRole.layout).result()
        plan = schedule(
            dict(zip(self._workers.train, train_layouts, strict=True)),
            dict(zip(self._workers.generate, generate_layouts.result(), strict=True)),
            self._workers.engines,
            shapes,
            PRECISIONS[recipe.policy.precision],
            recipe.policy.generation.refit_cfg.bucket_bytes,
            self._nodes,
            self._network,
        ).plan()
        preparing = self._generate.scatter(GenerateRole.prepare_refit, [plan.ranks[rank] for rank in self._workers.generate])
        self._train.scatter(TrainRole.prepare_refit, [plan.ranks[rank] for rank in self._workers.train]).result()
        preparing.result()
        return msgspec.structs.replace(plan, ranks={})  # drop the ranks' parts, which are large; each rank has its own

    def __call__(self, version: int) -> dict[str, float]:
        """Serve the current weights as `version`, and return metrics of the cost. Raises RefitError if a digest differs."""
        start = time.perf_counter()
        receiving = self._generate.call(GenerateRole.receive)
        train_reports = dict(zip(self._workers.train, self._train.call(TrainRole.send).result(), strict=True))
        generate_reports = dict(zip(self._workers.generate, receiving.result(), strict=True))
        if self._plan is not None and self._digest:
            try:
                compare(self._plan, self._names, train_reports, generate_reports, version)
            except RefitError as error:
                outcome = "no version is served" if self.version is None else f"version {self.version} stays"
                raise RefitError(f"refit to version {version} failed, {outcome}: {error}") from None
        self._generate.call(GenerateRole.commit, Commit(version, self._recompute)).result()
        self.version = version
        return self._measure(train_reports, generate_reports, time.perf_counter() - start)

    def _measure(self, train: dict[int, RefitReport], generate: dict[int, RefitReport], seconds: float) -> dict[str, float]:
        """Return metrics: bytes, seconds of each stage, and the busiest rank's rate relative to the configured network's.

        Ranks that share GPUs do not refit over that network; for them the ratio compares the rate of their own path with it.
        """
        every = [*train.values(), *generate.values()]
        longest = max(report.total for report in every)
        pack = max(report.pack for report in train.values())
        apply = max(report.apply for report in generate.values())
        digest = max(report.digest for report in every)
        stages = {
            "pack": pack,
            "apply": apply,
            "wire": max(0.0, longest - max(pack, apply) - digest),  # time that neither end's own work explains
            "pause": seconds - longest,  # before the slowest rank begins, and after it ends
        }
        busiest = max(report.received for report in generate.values())
        one_node = len(set(self._nodes.values())) == 1
        rate = self._network.node_gb_per_s if one_node else self._network.nic_gb_per_s
        bound = max(stages, key=lambda stage: stages[stage])
        logger.info(f"refit: {busiest / 1e9:.3g} GB to the busiest rank in {seconds:.3g} s, bound by {bound}")
        return {
            "refit/bytes_sent": float(sum(report.sent for report in every)),
            "refit/bytes_received_max": float(busiest),
            **{f"time/refit_{name}": value for name, value in stages.items()},
            "time/refit_digest": digest,
            "throughput/refit_gb_per_s": busiest / seconds / 1e9,
            "throughput/refit_efficiency": busiest / (rate * 1e9) / seconds,
        }
