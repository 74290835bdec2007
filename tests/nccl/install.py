"""Install NCCL's rules in whole runs if HETSTEP_TEST_NCCL is set: see tests/end_to_end/faults/sitecustomize.py."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.nccl.group import ALONE, NAME, Group

SWITCH = "HETSTEP_TEST_NCCL"
"""The variable with the seconds that a communicator waits for its ranks, and an operation for its end."""

_batch_isend_irecv = dist.batch_isend_irecv


def into(world: Any) -> None:
    """Replace the gloo groups of `pipeline.job.world` by groups with NCCL's rules."""
    register()
    own = world.carriers(torch.device("cuda"))
    world.carriers = lambda device: NAME if "cpu:gloo" in own else ALONE


def register() -> None:
    """Make NAME and ALONE backends of torch.distributed. Batches of messages are only visible where they are posted."""
    for name in (NAME, ALONE):
        if name not in dist.Backend.backend_list:
            made = functools.partial(_group, name == ALONE)
            dist.Backend.register_backend(name, made, extended_api=True, devices=["cpu"])
    dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _group(alone: bool, options: Any, _: Any) -> Group:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return Group(options.store, options.group_rank, ranks, options.timeout, float(os.environ[SWITCH]), alone)


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Replace torch's function, which treats a group written in Python as one without batches."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, Group):
        return _batch_isend_irecv(operations)
    with group.batch():
        works = _batch_isend_irecv(operations)
    return works[:1]
