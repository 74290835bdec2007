"""The messages of RPC: envelopes through the store, and large bodies over the spanning group.

A large body for several ranks goes to the first of them, and each forwards it to two others, so rank 0 sends it once. The
envelope before it carries the SHA-256 of the body through the store, whose connections are authenticated. So nobody can replace
the body on its way. Hashing 1 GiB takes each end 0.65 s on a core with SHA instructions:
`python -m timeit -s "import hashlib; body = bytes(1 << 30)" "hashlib.sha256(body)"`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from pipeline.job.world import World
from pipeline.store.auth import AuthenticationError

INLINE = 64 << 10  # bytes; the store is one process for all ranks
STOP = "stop"
TAGS = 1 << 19  # `node_checks.network` uses tags from 1 << 20 on


class Envelope(msgspec.Struct, array_like=True):
    """A call of a verb, as ranks receive it."""

    call: int
    verb: str
    body: bytes  # empty if the body follows over the spanning group
    settled: int = 0  # rank 0 has the replies of all calls below this number
    follows: int = 0  # bytes of a body that follows
    digest: bytes = b""  # of a body that follows
    ranks: tuple[int, ...] = ()  # that get the body; `route` says from which rank


Sending = tuple[torch.Tensor, dist.Work]
"""A body in flight, which must stay alive until it has arrived."""


def following(body: bytes | memoryview) -> int:
    """Return the bytes that follow a message over the spanning group: the size of a large body, 0 for a small body."""
    return len(body) if len(body) > INLINE else 0


def digest(body: bytes | memoryview) -> bytes:
    """Return the SHA-256 of a body that follows its message; b"" for a body within its message."""
    return hashlib.sha256(body).digest() if following(body) else b""


def send_body(world: World, body: torch.Tensor, call: int, to: int) -> Sending:
    """Send a body to rank `to`, asynchronously."""
    work = dist.isend(body, to, group=world.spanning, tag=call % TAGS)
    assert work is not None  # both ranks are in the spanning group
    return body, work


def receive_body(world: World, size: int, expected_digest: bytes, call: int, source: int) -> torch.Tensor:
    """Wait for a body and return it as bytes of shape (size,). Raises AuthenticationError if its digest differs."""
    body = torch.empty(size, dtype=torch.uint8)
    dist.recv(body, source, group=world.spanning, tag=call % TAGS)
    if not hmac.compare_digest(digest(memoryview(body.numpy().data)), expected_digest):
        raise AuthenticationError(f"the body of {size} bytes received from {world.describe(source)} is not the one it sent")
    return body


def as_tensor(body: bytes) -> torch.Tensor:
    """Return a copy of a body as a tensor of bytes."""
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def route(ranks: Sequence[int], rank: int) -> tuple[int, list[int]]:
    """Return (the rank that sends a body to `rank`, the ranks that `rank` forwards it to): a binary tree below rank 0.

    Worked example, ranks [1, 2, 3, 5]: 0 -> 1, 1 -> 2 and 3, 2 -> 5.
    """
    i = ranks.index(rank)
    return ranks[(i - 1) // 2] if i else 0, list(ranks[2 * i + 1 : 2 * i + 3])
