"""Measure what digests and encryption add to a checkpoint: `python -m tests.benchmarks.checkpoint_cost [MB]`.

One rank writes a shard and reads it back, plain by the safetensors package (as before there were digests), with digests, and
encrypted; each as often as `TIMES`, in turn, of which the fastest counts. The files are in memory (/dev/shm), so that the disk
hides nothing. The step's own share, a copy of the state for a background write, is the same in all of them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.encryption import EncryptionKey
from pipeline.files import digests
from pipeline.train.tensor_files import EncryptedTensors, write_tensors

TIMES = 3


def main(megabytes: int) -> None:
    torch.set_num_threads(1)
    tensors = {f"model.layers.{i}.weight": torch.randn(1 << 12, 1 << 10) for i in range(max(1, megabytes // 16))}
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    key, found = EncryptionKey(os.urandom(32)), {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        paths = {name: folder / f"{name}.safetensors" for name in ("before", "digests", "encrypted")}
        work: dict[str, Callable[[], object]] = {
            "write, safetensors alone": lambda: save_file(tensors, paths["before"]),
            "write, with digests": lambda: write_tensors(tensors, paths["digests"]),
            "write, encrypted with digests": lambda: write_tensors(tensors, paths["encrypted"], key),
            "verify=full": lambda: digests.sha256(paths["digests"]),
            "read, plain": lambda: read_all(safe_open(paths["digests"], framework="pt"), tensors),
            "read, encrypted": lambda: read_all(EncryptedTensors(paths["encrypted"], key), tensors),
        }
        for name in list(work) * TIMES:
            begin = time.perf_counter()
            work[name]()
            found[name] = min(found.get(name, float("inf")), time.perf_counter() - begin)
    for name, seconds in found.items():
        print(f"{name:<30} {seconds:6.2f} s {size / seconds:6.2f} GB/s {seconds / size:6.2f} s per GB of a rank")


def read_all(file: Any, tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        file.get_tensor(name).sum()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
