"""Tensors that leave their device while others need its memory, and come back to the last bit.

A tensor's storage is emptied and filled again, so every view of it stays what it was: parameters that are cut, Megatron-Core's
buffers with all that points into them, an optimizer's state. Copies on the host are page-locked where the device is a GPU, and
their memory is kept for the next time, for as long as there is what they are copies of. They are locked here, because PyTorch's
own page-locked memory is rounded up to powers of two and never returned. Without a GPU they are in host memory as well, and
everything else is the same.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Offload:
    """The storages of one model."""

    def __init__(self, device: torch.device, shared: bool = False):
        """shared: another process takes turns on the GPU, so CUDA's cache is emptied for it whenever memory is freed."""
        self._device = device
        self._shared = shared
        # By storage. The references are weak, but while there is one no other storage gets the same identity.
        self._offloaded: dict[
            StorageWeakRef, tuple[torch.UntypedStorage, int, bool]
        ] = {}  # its bytes, and whether they are kept
        self._copies: dict[StorageWeakRef, torch.Tensor] = {}  # [bytes] uint8

    def offload(self, tensors: Iterable[torch.Tensor], keep: Iterable[torch.Tensor] = (), frozen: bool = False) -> None:
        """Copy them to the host and free their memory, but for storages of `keep`. Who is not on the device, or away already,
        stays as it is. frozen: they never change, so a copy made before is as good as a new one."""
        self._copies = {key: copy for key, copy in self._copies.items() if not key.expired()}
        kept = {_key(tensor) for tensor in keep}
        leaving = [(key, storage) for key, storage in self._here(tensors) if key not in kept]
        for key, storage in leaving:
            flat = _flat(storage)
            if key in self._copies and len(self._copies[key]) != len(flat):
                del self._copies[key]
            if key not in self._copies:
                self._copies[key] = host_memory(len(flat), self._device.type == "cuda")
            elif frozen:
                continue
            self._copies[key].copy_(flat, non_blocking=True)
        self._settle()
        self._free(leaving, kept=True)

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free their memory. It comes back with any content."""
        self._free(list(self._here(tensors)), kept=False)

    def reload(self) -> None:
        """All that is away."""
        for key, (storage, size, kept) in self._offloaded.items():
            storage.resize_(size)
            if kept:
                _flat(storage).copy_(self._copies[key], non_blocking=True)
        self._settle()
        self._offloaded = {}

    def _here(self, tensors: Iterable[torch.Tensor]) -> Iterable[tuple[StorageWeakRef, torch.UntypedStorage]]:
        found = {_key(t): t.untyped_storage() for t in tensors if t.device.type == self._device.type}
        return [(key, storage) for key, storage in found.items() if key not in self._offloaded and storage.nbytes()]

    def _free(self, leaving: list[tuple[StorageWeakRef, torch.UntypedStorage]], kept: bool) -> None:
        for key, storage in leaving:
            self._offloaded[key] = (storage, storage.nbytes(), kept)
            storage.resize_(0)
        if self._shared and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def host_memory(size: int, page_locked: bool) -> torch.Tensor:
    """[size] uint8, in pages of its own. They are unlocked when the tensor goes. Raises torch.cuda.CudaError if they cannot be
    locked."""
    # Shared: after a fork, pages that are a process's own would be copied, and CUDA would go on with the old ones.
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if page_locked:
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), size, 0))
        weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8: all of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
