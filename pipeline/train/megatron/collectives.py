"""Work that the ranks of a group share: each does its part and tells the others a text, and if one fails, all do.

For few and small messages; they travel as bytes, never as pickled objects.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

_DONE, _FAILED = b"+", b"-"


def on_all_ranks(group: dist.ProcessGroup, work: Callable[[], str | None]) -> list[str]:
    """What `work()` gave on each rank, "" for None, in the order of ranks. Collective; returns when all ranks have done theirs.

    Raises what this rank's work raised, or RuntimeError with what other ranks' did, so that no rank waits for one that failed.
    """
    try:
        told, error = _DONE + (work() or "").encode(), None
    except Exception as caught:
        told, error = _FAILED + f"{type(caught).__name__}: {caught}".encode(), caught
    everyone = all_gather_bytes(group, told)
    if error is not None:
        raise error
    if failures := [f"train rank {i}: {t[1:].decode()}" for i, t in enumerate(everyone) if t.startswith(_FAILED)]:
        raise RuntimeError("; ".join(failures))
    return [text[1:].decode() for text in everyone]


def on_first_rank(group: dist.ProcessGroup, work: Callable[[], str | None]) -> str:
    """What `work()` gave on the group's first rank, which alone does it; otherwise as `on_all_ranks`."""
    return on_all_ranks(group, work if group.rank() == 0 else lambda: None)[0]


def all_gather_bytes(group: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """Every rank's message, in the order of ranks."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [row.numpy().tobytes()[: int(length)] for row, length in zip(rows, lengths, strict=True)]
