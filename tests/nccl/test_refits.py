"""Refits over a group that enforces NCCL's rules, where ranks forward data, share a node, or have no messages in a round."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.nccl import install
from tests.refit import ranks
from tests.refit.ranks import World
from tests.refit.test_transfer import CASES, transfers


def refits(world: World, folder: Path, transport: str) -> None:
    """Run `transfers` on a spanning group whose communicator is made first, as in a run."""
    place = {"HETSTEP_NODE": "here", "HETSTEP_COMPONENT": "any", "HETSTEP_LOCAL_RANK": str(world.rank)}
    os.environ |= {**place, install.SWITCH: "60"}
    install.register()
    dist.group.WORLD = world.spanning
    world.spanning = dist.new_group(backend=install.NAME)
    dist.all_reduce(torch.zeros(1), group=world.spanning)
    transfers(world, folder, transport, CASES)


@pytest.mark.parametrize("transport", ["planned", pytest.param("delta", marks=pytest.mark.full)])
def test_received_weights_equal_the_sent_ones(transport, tmp_path):
    ranks.run(refits, tmp_path, transport)
