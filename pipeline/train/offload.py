"""Move tensors to host memory while others need the device, and back without any change of their bits.

A tensor's storage is emptied and refilled, so all views of it stay valid: sharded parameters, Megatron-Core's buffers and the
views into them, an optimizer's state. On a GPU the copies are page-locked, and their memory is reused for as long as the
original storage exists. It is page-locked here because PyTorch rounds its own page-locked memory up to powers of two and never
returns it. Without a GPU everything works the same, with copies in ordinary host memory.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Offload:
    """Moves the storages of one model's tensors to host memory and back."""

    def __init__(self, device: torch.device, shared: bool = False):
        """shared: whether another process uses the GPU in turns; CUDA's cache is then emptied whenever memory is freed."""
        self._device = device
        self._shared = shared
        # By storage: (storage, bytes, whether kept). While a weak reference exists, no other storage gets the same identity.
        self._offloaded: dict[StorageWeakRef, tuple[torch.UntypedStorage, int, bool]] = {}
        self._copies: dict[StorageWeakRef, torch.Tensor] = {}  # [bytes] uint8

    def offload(self, tensors: Iterable[torch.Tensor], keep: Iterable[torch.Tensor] = (), frozen: bool = False) -> None:
        """Copy tensors to the host and free their memory on the device, except for storages of `keep`.

        Tensors that are not on the device, or already offloaded, stay as they are. frozen: the tensors never change, so an
        earlier copy is reused.
        """
        self._copies = {key: copy for key, copy in self._copies.items() if not key.expired()}
        excluded = {_key(tensor) for tensor in keep}
        leaving = [(key, storage) for key, storage in self._here(tensors) if key not in excluded]
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
        self._free(leaving, copied=True)

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free the tensors' memory without a copy. After `reload` their content is undefined."""
        self._free(list(self._here(tensors)), copied=False)

    def reload(self) -> None:
        """Move everything back to the device."""
        for key, (storage, size, copied) in self._offloaded.items():
            storage.resize_(size)
            if copied:
                _flat(storage).copy_(self._copies[key], non_blocking=True)
        self._settle()
        self._offloaded = {}

    def _here(self, tensors: Iterable[torch.Tensor]) -> Iterable[tuple[StorageWeakRef, torch.UntypedStorage]]:
        storages = {_key(t): t.untyped_storage() for t in tensors if t.device.type == self._device.type}
        return [(key, storage) for key, storage in storages.items() if key not in self._offloaded and storage.nbytes()]

    def _free(self, leaving: list[tuple[StorageWeakRef, torch.UntypedStorage]], copied: bool) -> None:
        for key, storage in leaving:
            self._offloaded[key] = (storage, storage.nbytes(), copied)
            storage.resize_(0)
        if self._shared and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def host_memory(size: int, page_locked: bool) -> torch.Tensor:
    """Return a tensor [size] uint8 in host memory with pages of its own.

    page_locked: lock the pages until the tensor is freed; a forked process must not use them. Raises torch.cuda.CudaError if
    the pages cannot be locked.
    """
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    if page_locked:
        _prepare(block, memory)
        cuda = torch.cuda.cudart()
        assert cuda is not None  # the device is a GPU
        torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), size, 0))
        weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def _prepare(block: mmap.mmap, memory: torch.Tensor) -> None:
    """Set the kind of pages of a block and allocate them, which takes most of the time of page-locking.

    After a fork, a process gets a copy of a private page that it writes to, and CUDA would continue to use the old page. So
    forked processes do not get these pages, as with InfiniBand's registered memory (madvise(2), MADV_DONTFORK;
    ibv_fork_init(3)). They do not need the pages: after CUDA is in use, ranks fork only to start programs
    (launch/executors/forks.py). The pages of a shared mapping are not copied either, but such a mapping gets pages of 2 MB only
    if the node's shmem_enabled permits it. A private mapping gets them unless the node turns them off (Linux,
    Documentation/admin-guide/mm/transhuge.rst).
    """
    block.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without pages of 2 MB: locking takes longer
        block.madvise(mmap.MADV_HUGEPAGE)
    # By torch's threads. CUDA would allocate them in one thread, under a lock (github.com/pytorch/pytorch/pull/108488).
    memory[:: mmap.PAGESIZE].zero_()


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage as [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


# ---- frozen models ----------------------------------------------------------------------------------------------------------


ALIGNMENT = 256
"""Each tensor in host memory starts at a multiple of this number of bytes, which is a multiple of every dtype's size."""


class HostWeights:
    """The weights of a frozen model, for tensors that at other times hold nothing or the weights of another model.

    The weights never change, so they are only copied to the device, never back. While the model computes with them, its tensors
    refer to this copy. The tensors' usual memory keeps its content, and views of it stay valid (Megatron-Core's buffers of
    parameters). Without a GPU the tensors refer to the host memory itself, and nothing is copied.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device):
        """Copy the tensors to host memory, which is page-locked if the device is a GPU."""
        self._device = device
        self._tensors = list(tensors)
        # One block, since each would take a registration, and pages of 2 MB only from that size on.
        starts = [0, *itertools.accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in self._tensors)]
        self._block = host_memory(starts[-1], device.type == "cuda")
        self._host: list[torch.Tensor] = []
        for tensor, start in zip(self._tensors, starts, strict=False):
            host = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._host.append(host.copy_(tensor.detach()))

    def free_device(self) -> None:
        """Make the tensors refer to host memory from now on, except within `on_device`."""
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.data = host

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Within this context, make the tensors refer to the weights on the device."""
        before = [tensor.data for tensor in self._tensors]
        try:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for tensor, data in zip(self._tensors, before, strict=True):
                tensor.data = data
