"""Run environments on ranks of their own, for engines on other nodes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import msgspec

from pipeline.job.world import World, own_address
from pipeline.rollout.judges import parent_process
from pipeline.rollout.judges.environment_steps import EnvironmentSettings
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.judges.pools import JudgePools
from pipeline.rollout.judges.remote_process import ProcessServer, RemoteProcess

LABEL = b"environment"
"""Label of the secret of an attempt's environment ranks."""


class EnvironmentRole:
    """Starts processes of environments for engines' ranks, which send them all their work. It has no verbs."""

    def __init__(self, world: World) -> None:
        """Listen for engines' ranks."""
        self.wakeup = threading.Event()
        self._server = ProcessServer(own_address(world.store), world.store.code(LABEL, b""))
        world.store.set(_name(world.rank), msgspec.json.encode(self._server.address))

    def work(self, verb_waits: Callable[[], bool]) -> None:
        """Wait for the end of the run."""
        while not verb_waits():
            self.wakeup.wait()
            self.wakeup.clear()

    def close(self) -> None:
        """Wait until the environments are closed."""
        self._server.close()


def judge_pool(
    world: World, settings: EnvironmentSettings, wakeup: threading.Event, timeout_s: float
) -> JudgePool | JudgePools:
    """Return the pool of the engine that this rank leads: beside the engine, or on the environment ranks that serve it.

    timeout_s: to reach an environment rank.
    """
    if not (world.workers.environment and settings.env):
        return JudgePool(settings, wakeup)
    parent_process.end_early()
    engine = world.workers.engines.index(world.workers.engine(world.rank))
    pools = []
    for rank in serving_ranks(world.workers.environment, engine, len(world.workers.engines)):
        with world.phase(f"reach {world.describe(rank)}"):
            host, port = msgspec.json.decode(world.store.get(_name(rank)), type=tuple[str, int])
            connect = functools.partial(RemoteProcess.start, (host, port), world.store.code(LABEL, b""), timeout_s)
            pools.append(JudgePool(settings, wakeup, connect))
    return JudgePools(pools)


def serving_ranks(ranks: tuple[int, ...], engine: int, engines: int) -> tuple[int, ...]:
    """Return the environment ranks that serve an engine: at least one, and of more ranks than engines an equal share.

    Worked example, ranks 8 to 12: engine 0 of 2 has 8, 10 and 12, engine 1 has 9 and 11. With 7 engines, engine 6 has rank 9.
    """
    return ranks[engine::engines] or (ranks[engine % len(ranks)],)


def _name(rank: int) -> str:
    return f"environment/{rank}"
