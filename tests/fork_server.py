"""Provide a fork server that has imported what ranks need, so that each rank of a test starts in milliseconds."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import unittest.mock
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
SHARED = "HETSTEP_TEST_FORK_SERVER"
"""The variable with the address of the server that pytest's workers share."""
AT_START = frozenset(os.environ)
"""The variables that the server has before its other imports, some of which set variables for themselves."""

# A fork server imports its preload list once, when it starts. All tests share this list: a server started with a shorter one
# would leave every rank to import torch, Megatron-Core and transformers by itself.
IMPORTED = (
    "tests.fork_server",
    "launch.submit",
    "pipeline.generate.vllm",
    "pipeline.main",
    "pytest",
    "tests.end_to_end.warm",
    "tests.generate.engine_rank",
    "tests.nccl.ranks",
    "tests.refit.ranks",
    "tests.roles.judge_rank",
    "tests.roles.reward_rank",
    "tests.rollout.ranks",
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
    "tests.heap",
)


@functools.cache
def context() -> ForkServerContext:
    """Return the context of processes on the CPU, with its server started."""
    if address := os.environ.get(SHARED):
        server = forkserver._forkserver
        server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = lambda: None  # it is not a child of this process
    else:
        _start_server()
    return multiprocessing.get_context("forkserver")


def share() -> None:
    """Start a server for all of pytest's workers, which start next. Its imports take longer than most tests."""
    if sys.version_info < (3, 14):  # newer Pythons' servers require their starter's key
        _start_server()
        os.environ[SHARED] = forkserver._forkserver._forkserver_address


def _start_server() -> None:
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    # Looking for a GPU in the server would break CUDA in its forks, and importing Megatron-Core looks for one. OpenMP reads its
    # number of threads when torch is imported, and several threads round differently in each run.
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with unittest.mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()


def start(work: Callable, arguments: tuple, ranks: int) -> mp.ProcessContext:
    """Start `work(rank, *arguments)` in that many processes on the CPU.

    `join()` raises the first error that one of them raised.
    """
    import torch.multiprocessing as mp  # not if the server is shared

    context()
    return mp.start_processes(work, arguments, nprocs=ranks, start_method="forkserver", join=False)


def run(work: Callable, arguments: tuple, ranks: int) -> None:
    """Run `work(rank, *arguments)` in that many processes and wait for all."""
    processes = start(work, arguments, ranks)
    while not processes.join():
        pass


class Program:
    """Run a function as a program: a process with its own environment and output, in the project's folder.

    It has the methods of `subprocess.Popen` that tests use. The function returns the exit status; None is 0.
    """

    def __init__(self, function: Callable[..., int | None], arguments: tuple, environment: Mapping[str, str], output: Path):
        output.touch()  # so that a test may read it before the process writes
        self._process = context().Process(target=_play, args=(function, arguments, dict(environment), str(output)))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _play(function: Callable[..., int | None], arguments: tuple, environment: dict[str, str], output: str) -> None:
    for name in AT_START - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)
    os.chdir(ROOT)
    _redirect(output)
    sys.exit(function(*arguments))


def _redirect(output: str) -> None:
    """Redirect this process's output to a file, and its input from /dev/null."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "rb") as nothing, open(output, "ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
