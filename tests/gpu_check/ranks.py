"""Run a function in several processes, each with a GPU of its own or all on one, and return their results."""

from __future__ import annotations

import datetime
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import cuda_world

TIMEOUT = datetime.timedelta(seconds=120)


def over(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `work(rank, folder, *arguments)` in new processes, which share the folder.

    Raises the first error that one of them raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (work, Path(folder), arguments), nprocs=count, start_method="spawn")
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(count)]


def _rank(rank: int, work: Callable[..., Any], folder: Path, arguments: tuple) -> None:
    (folder / f"result-{rank}").write_bytes(pickle.dumps(work(rank, folder, *arguments)))


def join(device_type: str, rank: int = 0, count: int = 1, folder: Path | None = None) -> torch.device:
    """Make torch's default group of `count` ranks, with a GPU each, as `job/world.py` does. Return the rank's device."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    store = dist.FileStore(str(folder / "store"), count) if folder else dist.HashStore()
    cuda_world.join(device, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    return device
