"""Scenarios for the ranks of a small world with groups that enforce NCCL's rules, each with its own group."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from pipeline.train.host_messages import all_gather_bytes
from tests.nccl import install

SIZE = 3
HANGS_S = 2.0
"""Timeout of ranks in operations that the others never join."""

Scenario = Callable[[int, dist.ProcessGroup], None]


def batch(group: dist.ProcessGroup, *messages: tuple[str, int, torch.Tensor]) -> None:
    """messages: (to or from, the peer, the tensor)."""
    ways = {"to": dist.isend, "from": dist.irecv}
    for work in dist.batch_isend_irecv([dist.P2POp(ways[way], tensor, peer, group) for way, peer, tensor in messages]):
        work.wait()


# ---- allowed by NCCL --------------------------------------------------------------------------------------------------------


def all_collectives(rank: int, group: dist.ProcessGroup) -> None:
    """Collectives give the results of a gloo group."""
    plain = dist.new_group(backend="gloo")
    inputs = torch.arange(6.0) + 10 * rank

    def results(group: dist.ProcessGroup) -> list[torch.Tensor]:
        reduced, highest, sent, rooted, *many = (inputs.clone() for _ in range(14))
        dist.all_reduce(reduced, group=group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        dist.broadcast(sent, 1, group=group)
        dist.reduce(rooted, 2, group=group)
        with dist._coalescing_manager(group):
            for tensor in many:
                dist.all_reduce(tensor, group=group)
        gathered, into = [torch.empty(6) for _ in range(3)], torch.empty(18)
        dist.all_gather(gathered, inputs, group=group)
        dist.all_gather_into_tensor(into, inputs, group=group)
        scattered, one, chosen = torch.empty(2), torch.empty(2), torch.empty(2)
        dist.reduce_scatter_tensor(scattered, inputs, group=group)
        dist.reduce_scatter(one, list(inputs.split(2)), group=group)
        dist.scatter(chosen, list(inputs.split(2)) if rank == 0 else None, 0, group=group)
        rows = [torch.empty(6) for _ in range(3)] if rank == 0 else None
        dist.gather(inputs, rows, 0, group=group)
        exchanged, parts = torch.empty(3 * rank + 3), [torch.empty(2) for _ in range(3)]
        dist.all_to_all_single(exchanged, inputs, [rank + 1] * 3, [1, 2, 3], group=group)
        dist.all_to_all(parts, list(inputs.split(2)), group=group)
        whole = functional.all_gather_tensor(inputs, 0, group)
        dist.barrier(group=group)
        root = [rooted] if rank == 2 else []
        return [
            *(reduced, highest, sent, *many, *root, *gathered, into, scattered, one, chosen),
            *(*(rows or []), exchanged, *parts, whole),
        ]

    for ours, theirs in zip(results(group), results(plain), strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=0, atol=0)


def batches_after_a_collective(rank: int, group: dist.ProcessGroup) -> None:
    """Ranks without messages take no part; both ends may list theirs in any order."""
    dist.all_reduce(torch.zeros(1), group=group)
    if rank == 2:
        return
    received = [torch.empty(1 << 20), torch.empty(3)]
    arrivals = [("from", 1 - rank, tensor) for tensor in received]
    departures = [("to", 1 - rank, torch.full_like(tensor, rank + 1.0)) for tensor in received]
    batch(group, *(departures + arrivals if rank else arrivals + departures))
    assert all((tensor == 2 - rank).all() for tensor in received)


def messages_make_pairs(rank: int, group: dist.ProcessGroup) -> None:
    if rank < 2:
        (dist.send if rank else dist.recv)(torch.ones(2), 1 - rank, group=group)
        assert list(group._communicators) == [("pair", (0, 1))]


def the_host_has_no_rules(rank: int, group: dist.ProcessGroup) -> None:
    """Pickled objects, and sends of HOST's modules: in any order, by tags, without the other ranks."""
    names = [None] * SIZE
    dist.all_gather_object(names, f"rank {rank}", group=group)
    assert names == ["rank 0", "rank 1", "rank 2"]
    mail = types.ModuleType("pipeline.rpc.calls")
    exec("def go(function, *args, **options):\n    return function(*args, **options)", mail.__dict__)
    if rank < 2:
        tensors = [torch.full((n,), float(n)) for n in (1, 2)]
        ways = dist.isend, dist.irecv
        works = [mail.go(ways[rank], tensors[n], 1 - rank, group, n) for n in ((0, 1) if rank else (1, 0))]
        assert all(work.wait() for work in works)
        assert [tensor.tolist() for tensor in tensors] == [[1.0], [2.0, 2.0]]
    assert not group._communicators


def objects_on_the_gpu(rank: int, group: dist.ProcessGroup) -> None:
    """A group of NCCL alone carries pickled objects, as tensors of the GPU."""
    alone = dist.new_group(backend=install.ALONE)
    names = [None] * SIZE
    dist.all_gather_object(names, rank, group=alone)
    assert names == [0, 1, 2] and [kind for kind, _ in alone._communicators] == ["group"]


# ---- refused by NCCL --------------------------------------------------------------------------------------------------------


def host_tensors_without_a_carrier(rank: int, group: dist.ProcessGroup) -> None:
    """Megatron-Core's backend gathers tensors of the host."""
    assert all_gather_bytes(group, b"%d" % rank) == [b"0", b"1", b"2"]
    all_gather_bytes(dist.new_group(backend=install.ALONE), b"%d" % rank)


def first_a_batch_of_some(rank: int, group: dist.ProcessGroup) -> None:
    if rank < 2:
        batch(group, ("to" if rank else "from", 1 - rank, torch.zeros(4)))


def one_device_twice(rank: int, group: dist.ProcessGroup) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,5" if rank < 2 else "6"
    os.environ["HETSTEP_LOCAL_RANK"] = str(2 * rank)  # 0, 2 and 4: the first of two GPUs, and the only one
    dist.all_reduce(torch.zeros(1), group=group)


def different_collectives(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 2:
        dist.broadcast(torch.zeros(4), 0, group=group)
    else:
        dist.all_reduce(torch.zeros(4), group=group)


def different_numbers(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(4), group=group)
    dist.all_reduce(torch.zeros(4 + (rank == 1)), group=group)


def different_types(rank: int, group: dist.ProcessGroup) -> None:
    dist.broadcast(torch.zeros(4, dtype=torch.bfloat16 if rank == 1 else torch.float32), 0, group=group)


def different_splits(rank: int, group: dist.ProcessGroup) -> None:
    """Rank 1 sends rank 0 two rows, but rank 0 expects one."""
    splits = [2, 1, 0] if rank == 1 else None
    dist.all_to_all_single(torch.zeros(3, 2), torch.zeros(3, 2), None, splits, group=group)


def a_send_without_its_pair(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1), group=group)
    if rank == 0:
        dist.isend(torch.zeros(1), 1, group=group)


def messages_by_tag(rank: int, group: dist.ProcessGroup) -> None:
    if rank == 0:
        works = [dist.isend(torch.zeros(n), 1, group=group, tag=n) for n in (3, 4)]
    elif rank == 1:
        works = [dist.irecv(torch.zeros(n), 0, group=group, tag=n) for n in (4, 3)]
    else:
        works = []
    for work in works:
        work.wait()


def both_send_first(rank: int, group: dist.ProcessGroup) -> None:
    if rank < 2:
        works = [way(torch.zeros(1), 1 - rank, group=group) for way in (dist.isend, dist.irecv)]
        for work in works:
            work.wait()


def a_batch_before_or_after_a_collective(rank: int, group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1), group=group)
    if rank == 0:
        batch(group, ("to", 1, torch.zeros(2)))
    dist.all_reduce(torch.zeros(1), group=group)
    if rank == 1:
        batch(group, ("from", 0, torch.zeros(2)))


LASTING: tuple[Scenario, ...] = (
    all_collectives,
    batches_after_a_collective,
    messages_make_pairs,
    the_host_has_no_rules,
    objects_on_the_gpu,
    host_tensors_without_a_carrier,
    one_device_twice,
    different_collectives,
    different_numbers,
    different_types,
    different_splits,
)
HANGING: tuple[Scenario, ...] = (
    first_a_batch_of_some,
    a_send_without_its_pair,
    messages_by_tag,
    both_send_first,
    a_batch_before_or_after_a_collective,
)


def play(rank: int, folder: str) -> None:
    """Run all scenarios and write each one's error on this rank to `folder`."""
    own = {"HETSTEP_NODE": "here", "HETSTEP_COMPONENT": "train", "HETSTEP_LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    install.register()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    raised = {}
    for scenario in (*LASTING, *HANGING):
        os.environ.update(own)
        os.environ[install.SWITCH] = str(HANGS_S if scenario in HANGING else 60)
        group = dist.new_group(backend=install.NAME)
        try:
            scenario(rank, group)
            raised[scenario.__name__] = ""
        except Exception as error:
            raised[scenario.__name__] = f"{type(error).__name__}: {error}"
        dist.barrier()
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(raised))
