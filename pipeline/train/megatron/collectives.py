"""Collective work: each rank runs a function, all ranks get all results, and all fail if one fails.

For few, small messages. They are sent as bytes, never as pickled objects.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

_DONE, _FAILED = b"+", b"-"


def on_all_ranks(group: dist.ProcessGroup, work: Callable[[], str | None]) -> list[str]:
    """Run `work` on each rank, and return the results of all ranks in rank order, with "" for None. Collective.

    Raises the error of this rank's work, or RuntimeError with the errors of other ranks, so no rank waits for a failed one.
    """
    try:
        message, error = _DONE + (work() or "").encode(), None
    except Exception as caught:
        message, error = _FAILED + f"{type(caught).__name__}: {caught}".encode(), caught
    messages = all_gather_bytes(group, message)
    if error is not None:
        raise error
    if failures := [f"train rank {i}: {m[1:].decode()}" for i, m in enumerate(messages) if m.startswith(_FAILED)]:
        raise RuntimeError("; ".join(failures))
    return [message[1:].decode() for message in messages]


def on_first_rank(group: dist.ProcessGroup, work: Callable[[], str | None]) -> str:
    """Run `work` on the group's first rank only, and return its result on all ranks. Otherwise as `on_all_ranks`."""
    return on_all_ranks(group, work if group.rank() == 0 else lambda: None)[0]


def all_gather_bytes(group: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """Return every rank's message, in rank order."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [row.numpy().tobytes()[: int(length)] for row, length in zip(rows, lengths, strict=True)]
