"""Let the ranks of one engine (tensor- and pipeline-parallel peers) do the same in the same order.

When an environment answers, and when a verb arrives, differs from rank to rank. So only the engine's leader decides: over the
engine's own gloo group it announces each of its moves before it makes it, and its peers follow. An engine of one rank has
nobody to tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist

from pipeline.encoding import decode, encode
from pipeline.generate.base import GenerateBackend
from pipeline.types import Completion, Request
from pipeline.world import World

STEP, WAIT, VERB = range(3)  # a step of the engine; waiting for environments; the next verb


class Move(msgspec.Struct, array_like=True):
    """All that goes before a step."""

    cut: list[str] = []  # requests that end where they are
    add: list[Request] = []


def apply_move(move: Move, engine: GenerateBackend) -> list[Completion]:
    """Make a move and its step; return what ended."""
    ended = engine.cut(move.cut) if move.cut else []
    if move.add:
        engine.add(move.add)
    return ended + engine.step()


class Lockstep:
    """group: of this engine's ranks, with gloo for tensors on the CPU; its first rank leads. None: it has only one."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group

    def announce(self, kind: int, move: Move | None = None) -> None:
        """Announce the leader's next move."""
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
        """Follow the leader's moves until the leader takes a verb. engine: None before there is one; then there are no
        steps."""
        with world.phase("wait for the leader"):
            kind, move = self._receive()
        while kind != VERB:
            before = kind
            with working(world) if kind == STEP else waiting(world):
                while kind == before:
                    if kind == STEP:
                        apply_move(move, engine)
                    kind, move = self._receive()


@contextmanager
def working(world: World) -> Iterator[None]:
    with world.phase("decode", verb="rollout"):
        yield


@contextmanager
def waiting(world: World) -> Iterator[None]:
    """Note the phase in which the engine has nothing to do until an environment has answered."""
    with world.phase("environment", verb="rollout"):
        yield
