"""Authenticate the ranks of gloo groups to each other before anything else travels over their connections.

gloo connects each pair of ranks by TCP. One rank of the pair listens, and accepts the first peer that sends an 8-byte number,
which is easy to guess. So as soon as a group is made, each pair of its ranks exchanges codes over its connection. A code is an
HMAC, with the attempt's key, of the group's nonce and both ranks. gloo never reconnects a pair, so one exchange is enough.
Codes are tensors of a fixed size, which are compared and never parsed. If a code is wrong or missing, the rank fails with an
error that names both ranks, and the attempt ends. So a foreign process that connects first can end an attempt, but its bytes
never reach the group.

`GlooAuthenticator.install` does this in the constructor of torch's ProcessGroupGloo. That covers the groups of `world.py`, and
the groups that FSDP's mesh, vLLM and Megatron-Core make later. It does not cover groups that C++ makes (`split_group`, which
needs groups bound to a device), but nothing here makes any. In worlds that connect lazily (`world.join`), groups across
components are authenticated only between rank 0 and each other rank. The other pairs exchange only bodies of RPC messages,
which have digests, and the payloads of the node checks.

This gives neither secrecy nor integrity against altered packets. gloo's later messages carry no codes; only bodies of RPC
messages have digests (`rpc/messages.py`). NCCL's sockets authenticate by a random number that travels through the store in the
clear, and vLLM's ZeroMQ sockets between the nodes of an engine do not authenticate at all. Keep all these ports on a network
that only the cluster reaches.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed exports it without a stub
from torch.distributed.distributed_c10d import ProcessGroupGloo

from pipeline.store.auth import MAC, NONCE, AuthenticationError
from pipeline.store.client import RunStore

WAIT_S = 60.0
"""Seconds to wait for a rank's code. All ranks of a group make the group at about the same time."""
TAG = 1 << 21  # of codes over a group's first interface; over the second + 1. No other message over gloo uses these tags
PAIR = struct.Struct(">QQQ")  # sender and receiver as ranks of the group, tag

_make = ProcessGroupGloo.__init__


class _GlooGroup(Protocol):
    """The part of torch's gloo group that authentication uses; torch's stubs lack it."""

    options: Any  # `_devices`: one for each network interface

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> dist.Work: ...


@dataclass(frozen=True)
class GlooAuthenticator:
    """Authenticates this rank in gloo groups."""

    store: RunStore
    rank: int  # in the world
    describe: Callable[[int], str]  # names a rank of the world
    phase: Callable[[str], AbstractContextManager[None]]

    def install(self) -> None:
        """Authenticate every gloo group that this process makes from now on, in its constructor."""

        def make(group: Any, store: Store, rank: int, size: int, *args, **keywords) -> None:
            if size > 1:
                self.offer(store, rank)
            _make(group, store, rank, size, *args, **keywords)
            if size > 1:
                self.authenticate(group, store, [(turn - rank) % size for turn in range(size) if (turn - rank) % size != rank])

        ProcessGroupGloo.__init__ = make  # pyright: ignore[reportAttributeAccessIssue]  # on purpose

    def offer(self, store: Store, rank: int) -> None:
        """Publish, before a group is made, this process's rank in the world. rank: its rank in the group.

        The group's first rank also draws the group's nonce.
        """
        store.set(f"proof/{rank}", str(self.rank))
        if rank == 0:
            store.set("proof", os.urandom(NONCE))  # pyright: ignore[reportArgumentType]  # takes bytes, too

    def authenticate(self, group: _GlooGroup, store: Store, peers: Iterable[int]) -> None:
        """Exchange codes with other ranks of a group over each connection to them, at most WAIT_S for each.

        peers: the other ranks, by their ranks in the group. With lazy connections a send waits for its receiver, so each rank
        must take its peers in an order that cannot deadlock, such as the order of `install`. Raises AuthenticationError, which
        names both ranks, if a code is wrong or missing.
        """
        timeout = min(timedelta(seconds=WAIT_S), timedelta(seconds=self.store.timeout_s / 2))  # less than cluster.timeouts.join
        rank, size = group.rank(), group.size()
        with self.phase(f"authenticate the {size} ranks of a gloo group"):
            nonce = store.get("proof")
            receives: list[tuple[int, int, torch.Tensor, dist.Work]] = []
            sends: list[tuple[int, torch.Tensor, dist.Work]] = []  # keeps each tensor until it is sent
            for peer in peers:
                for tag in range(TAG, TAG + len(group.options._devices)):  # one connection for each interface
                    code = torch.frombuffer(bytearray(self._code(nonce, rank, peer, tag)), dtype=torch.uint8)
                    peer_code = torch.zeros(MAC, dtype=torch.uint8)
                    with self._naming_peer(store, peer, size):
                        receives.append((peer, tag, peer_code, group.recv([peer_code], peer, tag)))
                        sends.append((peer, code, group.send([code], peer, tag)))
            for peer, tag, peer_code, work in receives:
                with self._naming_peer(store, peer, size):
                    work.wait(timeout)
                if not hmac.compare_digest(peer_code.numpy().tobytes(), self._code(nonce, peer, rank, tag)):
                    raise self._failure(store, peer, size, "the peer does not know the attempt's secret")
            for peer, _, work in sends:
                with self._naming_peer(store, peer, size):
                    work.wait(timeout)

    def _code(self, nonce: bytes, sender: int, receiver: int, tag: int) -> bytes:
        return self.store.code(b"gloo", nonce + PAIR.pack(sender, receiver, tag))

    @contextmanager
    def _naming_peer(self, store: Store, peer: int, size: int) -> Iterator[None]:
        """Convert gloo's errors within the context to AuthenticationErrors that name `peer`."""
        try:
            yield
        except RuntimeError as error:
            raise self._failure(store, peer, size, str(error).partition("\n")[0]) from error

    def _failure(self, store: Store, peer: int, size: int, why: str) -> AuthenticationError:
        peer_name = self.describe(int(store.get(f"proof/{peer}")))
        return AuthenticationError(
            f"{peer_name} did not authenticate to {self.describe(self.rank)} in a gloo group of {size} ranks: {why}."
            " Another program may have connected in its place. Try again, on a network that only the cluster reaches"
        )
