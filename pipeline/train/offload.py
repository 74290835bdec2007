"""Tensors that leave their device while others need its memory, and come back to the last bit.

A tensor's storage is emptied and filled again, so every view of it stays what it was: parameters that are cut, Megatron-Core's
buffers with all that points into them, an optimizer's state. Copies on the host are page-locked where the device is a GPU, and
their memory is kept for the next time. Without a GPU they are in host memory as well, and everything else is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Offload:
    """The storages of one model."""

    def __init__(self, device: torch.device):
        self._device = device
        self._away: dict[int, tuple[torch.UntypedStorage, int, bool]] = {}  # by storage: its bytes, and whether they are kept
        self._copies: dict[int, torch.Tensor] = {}  # by storage, [bytes] uint8

    def out(self, tensors: Iterable[torch.Tensor], keep: Iterable[torch.Tensor] = ()) -> None:
        """Copy them to the host and free their memory, but for storages of `keep`. Who is not on the device, or away already,
        stays as it is."""
        kept = {_key(tensor) for tensor in keep}
        leaving = [(key, storage) for key, storage in self._here(tensors) if key not in kept]
        for key, storage in leaving:
            flat = _flat(storage)
            if (copy := self._copies.get(key)) is None or len(copy) != len(flat):
                copy = self._copies[key] = torch.empty(len(flat), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            copy.copy_(flat, non_blocking=True)
        self._settle()
        self._free(leaving, kept=True)

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free their memory. It comes back with any content."""
        self._free(list(self._here(tensors)), kept=False)

    def back(self) -> None:
        """All that is away."""
        for key, (storage, size, kept) in self._away.items():
            storage.resize_(size)
            if kept:
                _flat(storage).copy_(self._copies[key], non_blocking=True)
        self._settle()
        self._away = {}

    def _here(self, tensors: Iterable[torch.Tensor]) -> Iterable[tuple[int, torch.UntypedStorage]]:
        found = {_key(t): t.untyped_storage() for t in tensors if t.device.type == self._device.type}
        return [(key, storage) for key, storage in found.items() if key not in self._away and storage.nbytes()]

    def _free(self, leaving: list[tuple[int, torch.UntypedStorage]], kept: bool) -> None:
        for key, storage in leaving:
            self._away[key] = (storage, storage.nbytes(), kept)
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the other process on this GPU can have it

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8: all of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
