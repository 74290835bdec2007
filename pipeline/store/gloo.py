"""Authenticate the ranks of gloo groups to each other before anything else travels over their connections.

gloo connects each pair of ranks by TCP. One of the two listens and accepts the first peer that sends an 8-byte number, which is
easy to guess. So as soon as a group is made, each pair of its ranks exchanges codes over its connection: HMACs, with the
attempt's key, of the group's nonce and both ranks. gloo never reconnects a pair, so once is enough. Codes are tensors of
a fixed size, which are compared and never parsed. If a code is wrong or missing, the rank fails with an error that names both
ranks, and the attempt ends. A stranger who connects first can therefore end an attempt, but none of its bytes reach the group.

`GlooAuthenticator.install` does this in the constructor of torch's ProcessGroupGloo. That covers the groups of `world.py` and
those that FSDP's mesh, vLLM and Megatron-Core make later. It does not cover groups that C++ makes (`split_group`, which needs
groups bound to a device); nothing here makes one. In worlds that connect lazily (`world.join`), groups across components are
authenticated only between rank 0 and each other rank. The other pairs exchange only bodies of RPC messages, which have digests,
and the payloads of the node checks.

Not covered: secrecy, and integrity against whoever alters packets: gloo's later messages carry no codes; only bodies of RPC
messages have digests (`rpc/messages.py`). NCCL's sockets authenticate by a random number that travels through
the store in the clear, and vLLM's ZeroMQ sockets between the nodes of an engine not at all. Keep all these ports on a network
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

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from pipeline.store.auth import MAC, NONCE, AuthenticationError
from pipeline.store.client import RunStore

WAIT_S = 60.0
"""For one rank's code. Groups are made by all of their ranks at about the same time."""
TAG = 1 << 21  # of the codes over a group's first interface, and so on; no other message over gloo has these
PAIR = struct.Struct(">QQQ")  # sender and receiver, as ranks of the group, and the tag

_make = ProcessGroupGloo.__init__


@dataclass(frozen=True)
class GlooAuthenticator:
    """One rank's end of all proofs."""

    store: RunStore
    rank: int  # in the world
    describe: Callable[[int], str]  # a rank of the world
    phase: Callable[[str], AbstractContextManager[None]]

    def install(self) -> None:
        """Prove every gloo group that this process makes from now on, in its constructor."""

        def make(group: ProcessGroupGloo, store: dist.Store, rank: int, size: int, *args, **keywords) -> None:
            if size > 1:
                self.offer(store, rank)
            _make(group, store, rank, size, *args, **keywords)
            if size > 1:
                self.authenticate(group, store, [(turn - rank) % size for turn in range(size) if (turn - rank) % size != rank])

        ProcessGroupGloo.__init__ = make

    def offer(self, store: dist.Store, rank: int) -> None:
        """Say in the group's store, before the group is made, which rank of the world `rank` of the group is.

        The group's first rank also draws the group's nonce.
        """
        store.set(f"proof/{rank}", str(self.rank))
        if rank == 0:
            store.set("proof", os.urandom(NONCE))

    def authenticate(self, group: ProcessGroupGloo, store: dist.Store, peers: Iterable[int]) -> None:
        """Exchange codes with other ranks of a group, over each connection to them, at most WAIT_S for each.

        peers: as ranks of the group. Where gloo connects ranks when they first speak, one that speaks waits for the other:
        then each rank and its peers must come to each other in an order that cannot lock, as `install` has it.

        Raises AuthenticationError, naming both ranks, if a code is wrong or does not come.
        """
        timeout = min(timedelta(seconds=WAIT_S), self.store.timeout / 2)  # before `cluster.timeouts.join` is over
        own, size = group.rank(), group.size()
        with self.phase(f"prove the {size} ranks of a gloo group"):
            nonce = store.get("proof")
            receives: list[tuple[int, int, torch.Tensor, dist.Work]] = []
            sends: list[tuple[int, torch.Tensor, dist.Work]] = []  # a tensor must live until it is sent
            for peer in peers:
                for tag in range(TAG, TAG + len(group.options._devices)):  # a connection over each interface
                    code = torch.frombuffer(bytearray(self._code(nonce, own, peer, tag)), dtype=torch.uint8)
                    received = torch.zeros(MAC, dtype=torch.uint8)
                    with self._naming(store, peer, size):
                        receives.append((peer, tag, received, group.recv([received], peer, tag)))
                        sends.append((peer, code, group.send([code], peer, tag)))
            for peer, tag, received, work in receives:
                with self._naming(store, peer, size):
                    work.wait(timeout)
                if not hmac.compare_digest(received.numpy().tobytes(), self._code(nonce, peer, own, tag)):
                    raise self._failed(store, peer, size, "what has connected does not know the attempt's secret")
            for peer, _, work in sends:
                with self._naming(store, peer, size):
                    work.wait(timeout)

    def _code(self, nonce: bytes, sender: int, receiver: int, tag: int) -> bytes:
        return self.store.code(b"gloo", nonce + PAIR.pack(sender, receiver, tag))

    @contextmanager
    def _naming(self, store: dist.Store, peer: int, size: int) -> Iterator[None]:
        """Raise AuthenticationError for what gloo raises while it speaks with `peer`."""
        try:
            yield
        except RuntimeError as error:
            raise self._failed(store, peer, size, str(error).partition("\n")[0]) from error

    def _failed(self, store: dist.Store, peer: int, size: int, why: str) -> AuthenticationError:
        who = self.describe(int(store.get(f"proof/{peer}")))
        return AuthenticationError(
            f"{who} has not proven itself to {self.describe(self.rank)} in a gloo group of {size} ranks: {why}."
            " A stranger may have connected in its place. Try again, on a network that only the cluster reaches"
        )
