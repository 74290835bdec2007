"""Record where the host waits for the GPU: a kernel can be launched only after those before it have run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators whose result, or its size, depends on values.
_READING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "bincount"),
    *("unique_consecutive", "unique_dim", "_unique2"),
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_OURS = ("pipeline", "transformers", "megatron")


class Waits(TorchDispatchMode):
    """Counts the operations that wait, by the function of the pipeline or of a library that calls them.

    everywhere: take all tensors for those of a GPU.
    """

    def __init__(self, everywhere: bool = False):
        super().__init__()
        self.found: Counter[str] = Counter()
        self._everywhere = everywhere

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._waits(function, args, kwargs):
            self.found[_caller()] += 1
        return function(*args, **kwargs)

    def _waits(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        name, on_gpu = function._schema.name.removeprefix("aten::"), [tensor.is_cuda for tensor in tensors]
        if name == "_to_copy":
            there = torch.device(kwargs["device"]).type == "cuda" if kwargs.get("device") is not None else on_gpu[0]
            return there != on_gpu[0] and not (there and kwargs.get("non_blocking"))
        if name == "copy_":
            return on_gpu[0] != on_gpu[1] and not (on_gpu[0] and (len(args) > 2 and args[2]))
        if not (self._everywhere or any(on_gpu)):
            return False
        if name in _INDEXING:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return name in _READING or (name == "repeat_interleave" and kwargs.get("output_size") is None)


def _caller() -> str:
    """Return the innermost function of the pipeline, of transformers or of Megatron-Core, as module.function."""
    frame = sys._getframe(2)
    while frame := frame.f_back:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in _OURS:
            return f"{module}.{frame.f_code.co_name}"
    return Path(__file__).stem
