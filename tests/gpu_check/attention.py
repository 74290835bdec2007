"""Compare packed attention with the exact blocks in float64, forward and backward, and with itself."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from unittest import mock

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from pipeline.train import attention, kernels
from pipeline.train.attention import AttentionKind, attend
from pipeline.train.kernels import make_deterministic
from pipeline.train.sequence_bounds import Packing
from tests.gpu_check.measurement import Measurement, Place
from tests.gpu_check.repeats import equal

KINDS = {  # each with grouped queries; whether it has sinks, the width of its heads
    "grouped": (AttentionKind(), False, 64),
    "wide": (AttentionKind(), False, 128),
    "window": (AttentionKind(window=100), False, 64),
    "sinks": (AttentionKind(), True, 64),
    "soft cap": (AttentionKind(softcap=2.0), False, 64),  # by flex attention
}
LENGTHS = {"full": ((12,), (5, 150, 1, 130, 12), (2000,), (700, 1300)), "tiny": ((12,), (5, 40, 1))}
REPEATED = {"full": (1500, 1500), "tiny": (100, 100)}
NEAR = 0.03
"""Largest difference, as a share of the largest entry: bfloat16 has 8 bits, and gradients are sums of rounded products."""
FLASH_3 = "FlashAttention-3"
KERNELS = {"_varlen": "varlen", "flex": "flex", "_per_run": "blocks"}  # the functions that `attend` chooses from


def check(place: Place) -> Measurement:
    """Check each kind of attention."""
    measured, repeated = Measurement(), {True: [], False: []}
    cases = {kind: functools.partial(_near, place, measured, kind) for kind in KINDS}
    measured.attempt(cases)
    if place.device == "cuda" and kernels._has_flash_attention_3(torch.device("cuda", 0)):  # then train ranks use it
        measured.attempt({FLASH_3: functools.partial(_near_by_flash_attention_3, place, measured)})
    for on in (False, True):
        measured.attempt({f"{kind}, repeated": functools.partial(_repeat, place, repeated[on], kind, on) for kind in KINDS})
    measured.details = {"equal": repeated[False], "equal with deterministic operators": repeated[True]}
    measured.note = "; ".join(f"{name}: {', '.join(kinds) or 'none'}" for name, kinds in measured.details.items())
    if others := KINDS.keys() - set(repeated[True]):
        measured.problems.append(f"deterministic backward passes differ: {', '.join(sorted(others))}")
    return measured


def _near_by_flash_attention_3(place: Place, measured: Measurement) -> None:
    activate_flash_attention_impl("FA3")
    try:
        for kind in KINDS:
            _near(place, measured, kind, f", {FLASH_3}")
    finally:
        restore_flash_attention_impl()


def _near(place: Place, measured: Measurement, kind: str, by: str = "") -> None:
    """Add the largest difference of outputs and gradients."""
    worst = 0.0
    for lengths in LENGTHS[place.size]:
        rounded = _inputs(place, sum(lengths), KINDS[kind][2])
        exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
        with _kernels() as taken:
            ours = _pass(rounded, kind, lengths)
        if place.device == "cuda" and "blocks" in taken:
            measured.problems.append(f"{kind}: no kernel computes it, but the blocks")
        theirs = _pass(exact, kind, lengths)
        for one, other in zip(ours, theirs, strict=True):
            worst = max(worst, ((one.double() - other).abs().max() / other.abs().max()).item())
    measured.limit(f"{kind}{by}", worst, NEAR)


def _repeat(place: Place, same: list[str], kind: str, on: bool) -> None:
    """Add the kind to `same` if several passes have the same gradients."""
    lengths = REPEATED[place.size]
    inputs = _inputs(place, sum(lengths), KINDS[kind][2])
    if on:
        make_deterministic()
    try:
        if equal(lambda: _pass(inputs, kind, lengths)):
            same.append(kind)
    finally:
        torch.use_deterministic_algorithms(False)


def _inputs(place: Place, tokens: int, width: int) -> list[torch.Tensor]:
    """Return query [T, 4, D], key and value [T, 2, D], and sinks [4]."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, width), (tokens, 2, width), (tokens, 2, width), (4,))
    return [torch.randn(shape, generator=draw).to(place.device, torch.bfloat16).requires_grad_() for shape in shapes]


def _pass(inputs: list[torch.Tensor], name: str, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the output and the gradients of all inputs that take part."""
    kind, with_sinks, _ = KINDS[name]
    used = inputs if with_sinks else inputs[:3]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=inputs[0].device)
    output = attend(*inputs[:3], Packing.of_lengths(lengths, starts), kind, inputs[3] if with_sinks else None)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), used)]


@contextlib.contextmanager
def _kernels() -> Iterator[set[str]]:
    """Return the kernels that `attend` takes within the context."""
    taken: set[str] = set()

    def noting(name: str, function):
        def called(*arguments):
            taken.add(name)
            return function(*arguments)

        return called

    with contextlib.ExitStack() as stack:
        for function, name in KERNELS.items():
            stack.enter_context(mock.patch.object(attention, function, noting(name, getattr(attention, function))))
        yield taken
