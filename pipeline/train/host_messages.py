"""Exchange small messages between train ranks, as bytes and never as pickled objects."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_bytes(group: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """Return every rank's message, in rank order. Collective.

    The messages are host tensors, also on a machine with GPUs: a group of NCCL alone has no backend for them.
    """
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [row.numpy().tobytes()[: int(length)] for row, length in zip(rows, lengths, strict=True)]
