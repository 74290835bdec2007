"""Work of `tests.world.ranks` while a stranger is at the ports of their groups (`stranger.py`)."""

from __future__ import annotations

import os
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import pipeline.job.world
from pipeline.job.world import World
from pipeline.rpc import RpcGroup, verb

TURNS = 6  # in about half of them the rank that listens joins first
UNDER_WAY: list[tuple[torch.Tensor, dist.Work]] = []  # messages that must never be accepted from a stranger


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def late() -> None:
    time.sleep(float(os.environ.get("LATE_S", 0)))


def late_for_groups() -> None:
    """Delay the second rank of a realm or an engine in each group that is made from now on."""
    make = distributed_c10d._new_process_group_helper
    if dist.get_rank() == 1:
        distributed_c10d._new_process_group_helper = lambda *arguments, **keywords: (late(), make(*arguments, **keywords))[1]


def join_sparsely(world: World) -> None:
    """Join like a large world whose refit uses NCCL: ranks connect lazily."""
    patch = unittest.mock.patch.object
    with patch(pipeline.job.world, "RELAYED_FROM", 2), patch(world, "carrier", torch.device("cuda")):
        pipeline.job.world.join(world)


class Verbs:
    world: World

    @verb("setup")
    def foreign(self) -> int:
        """Return the number of bytes not sent by their supposed sender, over each pair of ranks that authenticates itself."""
        wrong = 0
        sparse = "SPARSE" in os.environ  # then only pairs with rank 0 do, and those of a component
        for group in (self.world.spanning, self.world.own, None if sparse else self.world.refit):
            if group in (None, dist.GroupMember.NON_GROUP_MEMBER):
                continue
            peers = [rank for rank in range(group.size()) if rank != group.rank()]
            if sparse and group is self.world.spanning and group.rank():
                peers = [0]
            said = torch.full((64,), group.rank(), dtype=torch.uint8)
            UNDER_WAY.extend((said, dist.isend(said, group=group, group_dst=peer)) for peer in peers)
            for peer in peers:
                heard = torch.full((64,), peer, dtype=torch.uint8)
                dist.recv(heard, group=group, group_src=peer)
                wrong += int((heard != peer).sum())
        return wrong

    @verb("setup")
    def objects(self, maker: str) -> list[int]:
        """Return what the second rank of a realm receives over groups that a library makes, which it joins late."""
        said = []
        for group in self._groups(maker) if dist.get_world_size() > 1 else ():
            objects = [len(said) if group.rank() == 1 else None]
            dist.broadcast_object_list(objects, group_src=1, group=group)
            said += objects
        return said

    def _groups(self, maker: str) -> Iterator[dist.ProcessGroup]:
        from megatron.core import parallel_state
        from vllm.distributed.parallel_state import GroupCoordinator

        late_for_groups()
        for _ in range(TURNS):
            if maker == "mesh":
                yield init_device_mesh("cpu", (2,), backend_override={0: "gloo"}).get_group()
            elif maker == "megatron":
                yield parallel_state.create_group([0, 1], backend="gloo")
            else:
                yield GroupCoordinator([[0, 1]], 0, "gloo", use_device_communicator=False).cpu_group

    @verb("setup")
    def generate(self, folder: str) -> list[list[int]]:
        """Return tokens that a real engine of two ranks draws. The second rank joins each group late."""
        from safetensors.torch import load_file

        from pipeline.generate import build
        from tests.generate.tiny import drain, load, policy, requests

        late_for_groups()
        engine = build(policy(Path(folder), "vllm", tensor_parallel_size=2), 2, dist.get_rank(), seed=0)
        load(engine, load_file(Path(folder) / "model.safetensors").items(), 0)
        return [completion.tokens.tolist() for _, completion in sorted(drain(engine, requests(2, 2, temperature=0.0)).items())]


def coordinate(
    run_dir: Path,
    train: RpcGroup[Verbs],
    generate: RpcGroup[Verbs],
    reward: RpcGroup[Verbs],
    engine: RpcGroup[Verbs],
    task: str,
) -> None:
    print("ready", flush=True)
    if "WAITS" in os.environ:
        wait_for(run_dir / "visited")
    if task == "joined":
        others = [generate.call(Verbs.foreign), reward.call(Verbs.foreign)]
        counts = [*train.call(Verbs.foreign).result(), *(count for other in others for count in other.result())]
        print("foreign bytes:", sum(counts), flush=True)
    elif task == "engine":
        first, second = engine.call(Verbs.generate, str(run_dir / "model")).result()
        assert first == second and len(first) == 4
    else:
        (generate if task == "vllm" else train).call(Verbs.objects, task).result()
