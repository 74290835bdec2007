"""Keep the weights of a frozen model in host memory, and put them into the tensors of a model while it computes with them.

The weights never change, so they are only copied to the device, never back. While the model computes with them, its tensors
refer to this copy. The tensors' usual memory keeps its content, and views of it stay valid (Megatron-Core's buffers of
parameters). Without a GPU the tensors refer to the host memory itself, and nothing is copied.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import torch

from pipeline.train.offload import host_memory

ALIGNMENT = 256
"""Each tensor in host memory starts at a multiple of this number of bytes, which is a multiple of every dtype's size."""


class HostWeights:
    """The weights of a frozen model, for tensors that at other times hold nothing or the weights of another model."""

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
