"""Read requests, KV cache, prefix cache and preemptions of a vLLM engine for the resource monitor.

vLLM's own statistics (`disable_log_stats=False`) create objects for every step and request. This module reads the scheduler's
own counters instead, turns on its counter of the prefix cache, and counts preemptions where they happen.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats


class EngineReadings:
    """Reads a scheduler at any time, from any thread."""

    def __init__(self, scheduler: Scheduler):
        """Have the scheduler count lookups of prefixes and preemptions."""
        self._scheduler = scheduler
        self._preemptions = 0
        self._resetting = False
        manager = scheduler.kv_cache_manager
        if manager.prefix_cache_stats is None:
            manager.log_stats, manager.prefix_cache_stats = True, PrefixCacheStats()  # the scheduler does not reset it
        preempt, reset = scheduler._preempt_request, scheduler.reset_prefix_cache

        def count_and_preempt(*args: Any, **kwargs: Any) -> Any:
            self._preemptions += not self._resetting  # new weights preempt every request on purpose
            return preempt(*args, **kwargs)

        def resetting(*args: Any, **kwargs: Any) -> Any:
            self._resetting = True
            try:
                return reset(*args, **kwargs)
            finally:
                self._resetting = False

        scheduler._preempt_request, scheduler.reset_prefix_cache = count_and_preempt, resetting

    def read(self) -> dict[str, float]:
        """Return the readings, as `pipeline.monitor.readings` names them."""
        manager = self._scheduler.kv_cache_manager
        stats = manager.prefix_cache_stats
        running, queued = self._scheduler.get_request_counts()
        return {
            "running": float(running),
            "queued": float(queued),
            "kv_cache": manager.usage,
            "preemptions": float(self._preemptions),
            "prefix_queries": float(stats.queries if stats else 0),
            "prefix_hits": float(stats.hits if stats else 0),
        }
