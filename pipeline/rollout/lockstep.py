"""Keep the ranks of an engine (tensor- and pipeline-parallel peers) in lockstep: they make the same calls in the same order.

The time at which an environment answers, or a verb arrives, differs from rank to rank. So only the engine's leader decides. It
announces each move over the engine's own gloo group before it makes the move, and its peers make the same move. An engine of
one rank announces nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from pipeline.files.encoding import decode, encode
from pipeline.generate.generate_backend import GenerateBackend
from pipeline.job.world import World
from pipeline.types import Completion, Request

STEP, WAIT, VERB = range(3)  # make an engine step; wait for environments; take the next verb


class Move(msgspec.Struct, array_like=True):
    """The changes to the engine's requests before a step."""

    cut: list[str] = []  # requests to end
    add: list[Request] = []


@dataclass
class StepClock:
    """The number of steps of this rank's engine, and the seconds that they took."""

    steps: int = 0
    seconds: float = 0.0


def engine_readings(engine: GenerateBackend | None, clock: StepClock) -> dict[str, float]:
    """Return an engine's load by names of `pipeline.monitor.readings`; {} before it is built. Any thread may call this."""
    return {} if engine is None else {"engine_steps": float(clock.steps), "engine_s": clock.seconds, **engine.readings()}


def apply_move(move: Move, engine: GenerateBackend, clock: StepClock) -> list[Completion]:
    """Change the engine's requests by a move, step the engine once, and return the completions that ended."""
    completions = engine.cut(move.cut) if move.cut else []
    if move.add:
        engine.add(move.add)
    start = time.perf_counter()
    completions += engine.step()
    clock.steps, clock.seconds = clock.steps + 1, clock.seconds + time.perf_counter() - start
    return completions


class Lockstep:
    """Announces an engine's moves to its ranks, and follows them.

    group: the process group of the engine's ranks, with gloo for CPU tensors; its first rank leads. None if the engine has one
    rank.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self.clock = StepClock()

    def announce(self, kind: int, move: Move | None = None) -> None:
        """Announce the leader's next move to its peers."""
        if self._group is None:
            return
        body = encode(move) if move and (move.cut or move.add) else b""
        dist.broadcast(torch.tensor([kind, len(body)]), group=self._group, group_src=0)
        if body:
            dist.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), group=self._group, group_src=0)

    def _receive(self) -> tuple[int, Move]:
        header = torch.empty(2, dtype=torch.int64)
        dist.broadcast(header, group=self._group, group_src=0)
        kind, size = header.tolist()
        if not size:
            return kind, Move()
        body = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(body, group=self._group, group_src=0)
        return kind, decode(body.numpy().tobytes(), Move)

    def follow(self, engine: GenerateBackend | None, world: World) -> None:
        """Repeat the leader's moves until the leader takes a verb. engine: None before setup; then there are no steps."""
        with world.phase("wait for the leader"):
            kind, move = self._receive()
        while kind != VERB:
            followed_kind = kind
            with working(world) if kind == STEP else waiting(world):
                while kind == followed_kind:
                    if kind == STEP:
                        assert engine is not None
                        apply_move(move, engine, self.clock)
                    kind, move = self._receive()


@contextmanager
def working(world: World) -> Iterator[None]:
    """Report that the engine decodes, within the context."""
    with world.phase("decode", verb="rollout"):
        yield


@contextmanager
def waiting(world: World) -> Iterator[None]:
    """Report that the engine has nothing to do until an environment answers, within the context."""
    with world.phase("environment", verb="rollout"):
        yield
