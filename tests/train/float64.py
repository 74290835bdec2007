"""Run code in float64 that asks for float32: transformers computes norms, softmax and RoPE in float32 in any precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class Float64(TorchFunctionMode):
    """Give every function of torch float64 where it is asked for float32, in backward passes too."""

    @override
    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch.Tensor.view:  # of a file's bytes
            return func(*args, **kwargs or {})
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **{key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()})
