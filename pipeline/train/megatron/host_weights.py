"""Keep the weights of a frozen model in host memory, except while they are used.

They never change, so they are only copied to the device. Without a GPU both are the same memory and nothing is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class HostWeights:
    """The weights of a frozen model."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device):
        """Move them to the host, page-locked where the device is a GPU."""
        self._device = device
        self._tensors = list(tensors)
        self._host = [tensor.detach().to("cpu") for tensor in self._tensors]
        if device.type == "cuda":
            self._host = [tensor.pin_memory() for tensor in self._host]
        self._put_back()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device within this context."""
        try:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            self._put_back()

    def _put_back(self) -> None:
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.data = host
