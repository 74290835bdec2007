"""Simulate tensors on a GPU, on a machine without one: an operation that mixes them with the host's is refused.

torch's FakeTensorMode does so without values, so it fails where code reads a number, counts nonzeros, compares or digests; and
it allows a host tensor as an index, for which a GPU synchronizes. Here the values are real and lie in host memory, so that
results can be compared with the host's.

Left out: backward passes, which torch runs in a thread of the device. A `backward` of an autograd.Function can be called.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Operations that may move a tensor between devices."""
_CUDA, _META = 1, 14  # of c10::DeviceType


class MixedDevices(RuntimeError):
    """An operation mixes a host tensor with one of the GPU."""


class OnGPU(torch.Tensor):
    """A tensor whose values are in a host tensor."""

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=GPU
        )

    def __init__(self, host: torch.Tensor):
        self.host = host

    def __repr__(self) -> str:
        return f"OnGPU({self.host!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise MixedDevices(f"{function} of a pretended GPU's tensor, outside of `pretended`")


class Pretending(TorchDispatchMode):
    """The mode of `pretended` in one thread; other threads of the test enter it themselves."""

    def __enter__(self):
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=GPU) makes a host tensor and copies it
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        held = {id(value.host): value for value in given if isinstance(value, OnGPU)}
        hosts = [value for value in given if not isinstance(value, OnGPU) and value.ndim]  # numbers are passed by value
        if held and hosts and function not in COPIES:
            shapes = ", ".join(f"{value.dtype} {list(value.shape)}" for value in hosts)
            raise MixedDevices(f"{function}: a tensor of the GPU meets the host's {shapes}")
        device = kwargs.get("device")
        there = bool(held) if device is None else torch.device(device).type == "cuda"
        if device is not None and there:
            kwargs = kwargs | {"device": torch.device("cpu")}
        kwargs = {name: False if name == "pin_memory" else value for name, value in kwargs.items()}
        result = function(*tree_map(_host, args), **tree_map(_host, kwargs))
        if function is torch.ops.aten.copy_.default:  # its device is that of the destination
            return args[0]
        return tree_map(lambda value: _placed(value, held, there), result)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, OnGPU) else value


def _placed(value: Any, held: dict[int, OnGPU], there: bool) -> Any:
    if not there or not isinstance(value, torch.Tensor):
        return value
    return held.get(id(value)) if id(value) in held else OnGPU(value)  # an in-place operation returns the same tensor


@contextmanager
def pretended() -> Iterator[torch.device]:
    """Pretend to have a GPU for tensors that this thread makes in the block. Yields its device."""
    with pytest.MonkeyPatch.context() as patch, without_device_guards():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.Tensor, "pin_memory", lambda host: host)
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: _Event())
        with Pretending():
            yield GPU


@contextmanager
def without_device_guards() -> Iterator[None]:
    """Let operations run on pretended tensors of a GPU. A CPU build has no device guard for GPUs; meta's does nothing."""
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(_c10(), "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


class _Event:
    """Stands in for torch.cuda.Event and for a stream without pending work."""

    def __init__(self, enable_timing: bool = False):
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later._at - self._at)


def _c10() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))


def moved(value: Any, device: torch.device | str) -> Any:
    """Return tensors, or dataclasses and tuples of tensors, on a device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if dataclasses.is_dataclass(value):
        return type(value)(*(moved(getattr(value, field.name), device) for field in dataclasses.fields(value)))
    return tuple(moved(part, device) for part in value) if isinstance(value, tuple) else value


def assert_same(found: Any, expected: Any) -> None:
    """Assert equal values of dataclasses, tuples or dictionaries of tensors, the first on the GPU."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, OnGPU)
        torch.testing.assert_close(found.host, expected.detach(), rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, (tuple, list, dict)):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(found[key], expected[key])
    else:
        assert found == expected
