"""Rank 0's part of a refit: plan once, order each transfer, compare the digests, commit, and say what it cost.

A version is committed on all generate ranks only after every rank is done and, with `refit_cfg.digest`, after every one has
proved to hold what the train ranks hold. Whatever fails before that raises here, and the old version stays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from pipeline.config import PRECISIONS, Recipe
from pipeline.refit.base import Commit, RefitReport
from pipeline.refit.digest import RefitError, compare
from pipeline.refit.plan import schedule
from pipeline.refit.tables import RefitPlan
from pipeline.rpc import RpcGroup
from pipeline.world import WorkerGroups


class RefitCoordinator:
    """Call it to give the generate ranks what the train ranks hold."""

    def __init__(
        self,
        recipe: Recipe,
        workers: WorkerGroups,
        train: RpcGroup,
        generate: RpcGroup,
        shapes: Mapping[str, tuple[int, ...]],
        nodes: Mapping[int, str],
    ):
        """Plans, unless the transport is the broadcast. shapes: of all tensors on disk. nodes: of all ranks.

        Raises ValueError if the train ranks do not hold what the generate ranks want.
        """
        self._workers, self._train, self._generate = workers, train, generate
        self._network = recipe.cluster.network
        self._nodes = nodes
        self._names = list(shapes)
        self._digest = recipe.policy.generation.refit_cfg.digest
        self.incremental = recipe.policy.generation.refit_transport == "delta"  # engines must keep what they have
        self._recompute = recipe.grpo.async_grpo.recompute_kv_cache_after_weight_updates
        self.version: int | None = None  # that the generate ranks serve
        self._plan = None
        if recipe.policy.generation.refit_transport != "broadcast":
            self._plan = self._agree(recipe, shapes)

    def _agree(self, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> RefitPlan:
        wanted = self._generate.layout()
        held = self._train.layout().result()
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
        taken = self._generate.prepare_refit(parts=[agreed.ranks[rank] for rank in self._workers.generate])
        self._train.prepare_refit(parts=[agreed.ranks[rank] for rank in self._workers.train]).result()
        taken.result()
        return msgspec.structs.replace(agreed, ranks={})  # each rank has its own part; all of them are large

    def __call__(self, version: int) -> dict[str, float]:
        """Serve the present weights as `version`; what it took, as metrics.

        Raises RefitError if a digest differs.
        """
        start = time.perf_counter()
        receiving = self._generate.receive()
        sent = dict(zip(self._workers.train, self._train.send().result(), strict=True))
        received = dict(zip(self._workers.generate, receiving.result(), strict=True))
        if self._plan is not None and self._digest:
            try:
                compare(self._plan, self._names, sent, received, version)
            except RefitError as error:
                kept = "no version is served" if self.version is None else f"version {self.version} stays"
                raise RefitError(f"refit to version {version} failed, {kept}: {error}") from None
        self._generate.commit(Commit(version, self._recompute)).result()
        self.version = version
        return self._measure(sent, received, time.perf_counter() - start)

    def _measure(self, sent: dict[int, RefitReport], received: dict[int, RefitReport], seconds: float) -> dict[str, float]:
        """Bytes; where the time went; and the rate of the busiest rank against what the described network allows it. Ranks that
        share GPUs do not refit over that network: theirs says how far what they use instead is from it."""
        every = [*sent.values(), *received.values()]
        longest = max(report.total for report in every)
        pack = max(report.pack for report in sent.values())
        apply = max(report.apply for report in received.values())
        digest = max(report.digest for report in every)
        parts = {
            "pack": pack,
            "apply": apply,
            "wire": max(0.0, longest - max(pack, apply) - digest),  # what neither end's own work explains
            "pause": seconds - longest,  # before the slowest rank began, and after it was done
        }
        busiest = max(report.received for report in received.values())
        one_node = len(set(self._nodes.values())) == 1
        rate = self._network.node_gb_per_s if one_node else self._network.nic_gb_per_s
        print(
            f"refit: {busiest / 1e9:.3g} GB to the busiest rank in {seconds:.3g} s, bound by {max(parts, key=parts.get)}",
            flush=True,
        )
        return {
            "refit/bytes_sent": float(sum(report.sent for report in every)),
            "refit/bytes_received_max": float(busiest),
            **{f"time/refit_{name}": value for name, value in parts.items()},
            "time/refit_digest": digest,
            "throughput/refit_gb_per_s": busiest / seconds / 1e9,
            "throughput/refit_efficiency": busiest / (rate * 1e9) / seconds,
        }
