"""What travels: verbs and answers through the store, and bodies that are too large for it over the spanning group.

A large body that several ranks get goes to the first of them, and from each to two others: rank 0 sends it once. The message
before it tells its SHA-256 through the store, which is proven, so that nobody can replace it on its way. What that
takes each end of 1 GiB: `python -m timeit -s "import hashlib; body = bytes(1 << 30)" "hashlib.sha256(body)"`, 0.65 s on a core
with instructions for SHA.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from pipeline.store.auth import AuthenticationError
from pipeline.world import World

INLINE = 64 << 10  # bytes; the store is one process for all ranks
STOP = "stop"
TAGS = 1 << 19  # those from 1 << 20 on are of `node_checks.network`


class Envelope(msgspec.Struct, array_like=True):
    """A verb on its way to ranks."""

    call: int
    verb: str
    body: bytes  # empty if it follows over the spanning group
    settled: int = 0  # rank 0 has taken the replies to all calls below this number
    follows: int = 0  # bytes that follow
    digest: bytes = b""  # of what follows
    ranks: tuple[int, ...] = ()  # that these are to reach: each has them from the one that `route` says


Sending = tuple[torch.Tensor, dist.Work]
"""A body under way, which must live until it has arrived."""


def following(body: bytes | memoryview) -> int:
    """Return how many bytes follow a message over the spanning group: all of a large body, none of another."""
    return len(body) if len(body) > INLINE else 0


def digest(body: bytes | memoryview) -> bytes:
    """Return what the message before a body that follows tells of it: the SHA-256; of another body nothing."""
    return hashlib.sha256(body).digest() if following(body) else b""


def send_body(world: World, body: torch.Tensor, call: int, to: int) -> Sending:
    return body, dist.isend(body, to, group=world.spanning, tag=call % TAGS)


def receive_body(world: World, size: int, expected: bytes, call: int, source: int) -> torch.Tensor:
    """Wait for a body and return it as bytes of shape (size,). Raises AuthenticationError if `expected` is not its digest."""
    body = torch.empty(size, dtype=torch.uint8)
    dist.recv(body, source, group=world.spanning, tag=call % TAGS)
    if not hmac.compare_digest(digest(memoryview(body.numpy())), expected):
        raise AuthenticationError(f"the body of {size} bytes that came as {world.describe(source)}'s is not what it has sent")
    return body


def as_tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def route(ranks: Sequence[int], rank: int) -> tuple[int, list[int]]:
    """Return (from whom a rank has a body that `ranks` get, to whom it hands it on): a binary tree below rank 0.

    Worked example, ranks [1, 2, 3, 5]: 0 -> 1, 1 -> 2 and 3, 2 -> 5.
    """
    place = ranks.index(rank)
    return ranks[(place - 1) // 2] if place else 0, list(ranks[2 * place + 1 : 2 * place + 3])
