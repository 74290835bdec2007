"""A default process group as a run makes it, for tests on GPUs: gloo for host tensors, NCCL for the GPU's, no `device_id`.

Backends send host tensors too, which a group of NCCL alone refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pipeline.job.world import carriers


def join(device: torch.device, **place: Any) -> None:
    """Make the default group. place: this rank's, and the timeout, as `init_process_group` takes them."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(carriers(device), **place)


@contextmanager
def alone() -> Iterator[None]:
    """Make this process a world of one rank, with the first GPU."""
    join(torch.device("cuda", 0), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
