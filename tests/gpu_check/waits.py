"""Count the operations that wait for the GPU, during which no kernel is launched."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.gpu_check.measurement import Place

SYNCHRONIZES = "called a synchronizing CUDA operation"
"""torch's warning, c10/cuda/CUDAFunctions.cpp."""


@dataclass
class Waits:
    """Operations that wait for the GPU, by their places in the code."""

    places: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # of these: in the layers' forward


@contextlib.contextmanager
def counted(place: Place, layers: Sequence[nn.Module]) -> Iterator[Waits]:
    """Count the waits within the context. torch counts those of its operators, not those of collectives."""
    waits = Waits()
    if place.device != "cuda":
        yield waits
        return
    begun: list[int] = []
    with warnings.catch_warnings(record=True) as said, contextlib.ExitStack() as hooks:
        warnings.simplefilter("always")

        def places(since: int = 0) -> list[str]:
            mine = [warning for warning in said[since:] if SYNCHRONIZES in str(warning.message)]
            return [f"{warning.filename.rpartition('site-packages/')[2]}:{warning.lineno}" for warning in mine]

        for layer in layers:
            before = layer.register_forward_pre_hook(lambda *_: begun.append(len(said)))
            after = layer.register_forward_hook(lambda *_: waits.inside.extend(places(begun.pop())))
            for hook in (before, after):
                hooks.callback(hook.remove)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.places = places()
