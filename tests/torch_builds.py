"""What builds of PyTorch offer for packed attention, as recorded from each one, and stand-ins that take no other arguments.

Sources: torch/nn/attention/varlen.py of the wheels 2.11.0, 2.12.1 and 2.13.0, and of pull requests of pytorch/pytorch between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

NUMBERS = itertools.count()  # torch keeps the operators of a namespace that has been removed
PACKED = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k"
SCHEMA = "Tensor query, Tensor key, Tensor value"
STARTS = "Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k"
OPTIONS = "float? scale=None, SymInt[]? window_size=None"


class Build(NamedTuple):
    """The arguments of the function, and of the two private operators."""

    varlen_attn: str
    forward: str
    backward: str = f"Tensor grad_out, {SCHEMA}, Tensor out, Tensor lse, {STARTS}, bool is_causal, Tensor rng_state, {OPTIONS}"


BUILDS = {
    "2.11": Build(
        f"{PACKED}, *, return_aux=None, scale=None, window_size=(-1, -1)",
        f"{SCHEMA}, {STARTS}, bool is_causal=False, {OPTIONS}",
    ),
    "pull request 175101": Build(
        f"{PACKED}, *, return_aux=None, scale=None, window_size=(-1, -1), k_cache=None, v_cache=None, cache_seqlens=None,"
        " cache_batch_idx=None, page_table=None",
        f"{SCHEMA}, {STARTS}, bool is_causal=False, {OPTIONS}, Tensor? k_cache=None, Tensor? v_cache=None,"
        " Tensor? cache_seqlens=None, Tensor? cache_batch_idx=None, Tensor? page_table=None",
    ),
    "2.12 and 2.13": Build(
        f"{PACKED}, *, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None,"
        " num_splits=None",
        f"{SCHEMA}, {STARTS.replace('Tensor cu_seq_k', 'Tensor? cu_seq_k')}, bool is_causal=False, {OPTIONS},"
        " bool enable_gqa=False, Tensor? seqused_k=None, Tensor? block_table=None, SymInt? num_splits=None",
    ),
}
NO_WINDOWS = Build(  # pull request 164502, before 2.11
    f"{PACKED}, is_causal=False, return_aux=None",
    f"{SCHEMA}, {STARTS}, bool is_causal=False",
    f"Tensor grad_out, {SCHEMA}, Tensor out, Tensor lse, {STARTS}, bool is_causal, Tensor rng_state",
)


def function(build: Build, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the arguments of this build's varlen_attn; it passes all of them to `work` by name."""
    scope = {"work": work}
    exec(
        f"def varlen_attn({build.varlen_attn}):\n    return work(**{{k: v for k, v in locals().items() if k != 'work'}})", scope
    )
    return scope["varlen_attn"]


@contextmanager
def operators(build: Build, forward: Callable[..., Any], backward: Callable[..., Any]) -> Iterator[Any]:
    """Yield a namespace like torch.ops.torch_attn, with operators that torch checks the arguments of this build's for."""
    namespace = f"recorded{next(NUMBERS)}"
    with torch.library._scoped_library(namespace, "DEF") as library:
        for name, arguments, work in (
            ("_varlen_attn", build.forward, forward),
            ("_varlen_attn_backward", build.backward, backward),
        ):
            library.define(f"{name}({arguments}) -> (Tensor, Tensor, Tensor)")
            library.impl(name, work, "CompositeExplicitAutograd")
        yield getattr(torch.ops, namespace)
