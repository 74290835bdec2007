"""A fork server that has imported what ranks need, so that each rank of a test starts in milliseconds rather than seconds."""

from __future__ import annotations

import functools
import multiprocessing
import os
import unittest.mock
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import torch.multiprocessing as mp

# A fork server imports what it is told to when it starts, once for all tests of a process. All tests share this list: where one
# started it with less, every rank of the others would import torch, Megatron-Core and transformers by itself.
IMPORTED = (
    "pytest",
    "tests.refit.ranks",
    "tests.train.adapters",
    "tests.train.algorithms.invariance",
    "tests.train.megatron.layouts",
    "tests.world.ranks",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


@functools.cache
def context() -> ForkServerContext:
    """The context of processes on the CPU, with its server started."""
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    # Looking for a GPU in the server would spoil CUDA in what it forks, and Megatron-Core's imports look for one.
    with unittest.mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def start(work: Callable, arguments: tuple, ranks: int) -> mp.ProcessContext:
    """Start `work(rank, *arguments)` in as many processes on the CPU. `join()` raises what any of them raised first."""
    context()
    return mp.start_processes(work, arguments, nprocs=ranks, start_method="forkserver", join=False)


def run(work: Callable, arguments: tuple, ranks: int) -> None:
    """Do the same and wait until all are done."""
    processes = start(work, arguments, ranks)
    while not processes.join():
        pass
