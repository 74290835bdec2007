"""Set the environment variables of a launcher such as torchrun, which vLLM's `external_launcher` expects while it starts."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from pipeline.node import caches


@contextmanager
def launcher_environment(engine_ranks: int, rank_in_engine: int) -> Iterator[None]:
    """Set the environment variables that vLLM expects of a launcher, within the context.

    Afterwards restore these variables, all random state, and torch.set_num_threads, which vLLM's CPU worker replaces.
    VLLM_CACHE_ROOT is not restored: it names a folder of this device. Compiled code holds the device's index, but vLLM names
    its folder only after the rank in the engine (vllm/compilation/backends.py), so engines that share a folder would load code
    for the GPU of another engine.

    The NCCL variables that vLLM sets for its own communicators with VLLM_BATCH_INVARIANT are restored too. A refit may create a
    communicator with train ranks, and NCCL waits forever if its ranks have different variables (vllm/utils/nccl.py,
    pin_nccl_env).
    """
    root = os.environ.get("VLLM_CACHE_ROOT") or envs.VLLM_CACHE_ROOT
    os.environ["VLLM_CACHE_ROOT"] = caches.of_device(root, _device())
    launcher = {"RANK": rank_in_engine, "WORLD_SIZE": engine_ranks, "LOCAL_RANK": rank_in_engine}
    cuda = current_platform.is_cuda()
    if cuda:
        launcher["LOCAL_RANK"] = torch.cuda.current_device()  # vLLM uses the device of this number
    environment = {name: os.environ.get(name) for name in launcher}
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if cuda else None
    set_num_threads, distributed_args = torch.set_num_threads, ExecutorWithExternalLauncher._distributed_args
    os.environ.update({name: str(value) for name, value in launcher.items()})
    if engine_ranks > 1 and not cuda:
        # The CPU communicator names its shared memory after the text behind the last colon. Without this, engines on one node
        # would share a segment.
        name = torch.tensor([os.getpid()])
        dist.broadcast(name, group_src=0)
        init_method = f"env://:{name.item()}"
        ExecutorWithExternalLauncher._distributed_args = lambda self: (init_method, rank_in_engine, rank_in_engine)
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = distributed_args
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        environment |= dict.fromkeys([name for name in os.environ if name.startswith("NCCL_")]) | nccl
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _device() -> str:
    """Return the index and UUID of this process's GPU; on a CPU this rank's number on its node, as vLLM writes in place."""
    if not current_platform.is_cuda():
        return f"cpu-{os.environ.get('HETSTEP_LOCAL_RANK', '0')}"
    index = torch.cuda.current_device()
    return f"{index}-{torch.cuda.get_device_properties(index).uuid}"
