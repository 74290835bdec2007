"""A process group that carries its tensors over gloo and enforces NCCL's rules, like ProcessGroupNCCL.

    1. A communicator is made at its first operation, by all its ranks together; that blocks the caller (`initNCCLComm`).
    2. Two ranks of a communicator on one device are refused (NCCL's init.cc: "Duplicate GPU detected").
    3. A communicator's operations run one after another, so all ranks come to them in one order, with as many elements of one
       type. Shapes may differ.
    4. Point-to-point outside a batch makes a communicator of the pair at its first use, in a group of two as well. A batch
       takes the group's, so that all ranks must take part in it if it is the group's first operation (`pointToPoint`, and
       torch's documentation of `batch_isend_irecv`).
    5. Messages are told apart by their order; tags mean nothing.

    6. A group of NCCL alone has no carrier for tensors of the host.

These are the rules of groups without `device_id`, which the pipeline does not give. On a machine with GPUs a group is
"cpu:gloo,cuda:nccl", so tensors of the host go over gloo, which has none of these rules. In a test all tensors are the host's,
so `host_sender` goes by who sends.

Left out: streams. As on a GPU, an operation that is under way does not hold up its caller, but what the caller does to its
tensors meanwhile is not found.
"""

from __future__ import annotations

import os
import sys
import unittest.mock
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipeline.job import world
from tests.nccl.communicator import BrokenRule, Collective, Communicator, Member, Message, elements, gloo

NAME = "nccl_rules"
"""Stands for "cpu:gloo,cuda:nccl"."""
ALONE = "nccl_rules_alone"
"""Stands for "nccl"."""
HOST = (
    "pipeline.generate.vllm",
    "pipeline.rpc.calls",
    "pipeline.rpc.messages",
    "pipeline.rpc.serving",
    "pipeline.rollout.lockstep",
    "pipeline.train.host_messages",
)
"""Modules that send tensors of the host on a machine with GPUs too."""

MOST = 8
"""For more tensors than this, an error gives their number and a checksum of their descriptions."""
# The argument with the tensors of which all ranks must have as many elements. Other arguments may differ.
COMPARED = {
    "all_gather_single": 1,
    "all_gather_single_coalesced": 1,
    "allgather": 0,
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "barrier": None,
    "broadcast": 0,
    "gather": 1,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "scatter": 0,
}


class UnderWay(dist.Work):
    """An operation in progress. torch's own work of a future hides its error."""

    def __init__(self, done: torch.futures.Future):
        super().__init__()
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> torch.futures.Future:
        return self._done


class Group(dist.ProcessGroup):
    """One rank's end of a group. Its host tensors go over a gloo group that is made with it, as in torch."""

    def __init__(self, store: dist.Store, index: int, ranks: tuple[int, ...], timeout: Any, patience_s: float, alone: bool):
        """ranks: of the spanning world.

        patience_s: how long to wait for a communicator's ranks, and for an operation's end. alone: the group carries no
        host tensors.
        """
        super().__init__(index, len(ranks))
        self._index, self._ranks, self._patience_s, self._alone = index, ranks, patience_s, alone
        self._own_store = store
        self._host = gloo(dist.PrefixStore("host", store), index, len(ranks), timeout)
        self._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._host._get_backend(torch.device("cpu"))
        )
        self._communicators: dict[tuple[str, tuple[int, ...]], Communicator] = {}
        self._batch: tuple[list[Message], torch.futures.Future] | None = None

    def getBackendName(self) -> str:
        return ALONE if self._alone else NAME

    def _by_host(self) -> bool:
        """Return whether gloo carries the tensors that are sent now."""
        sender = host_sender()
        if self._alone and sender in HOST:
            raise RuntimeError("No backend type associated with device type cpu")  # as torch for a group of NCCL
        return sender is not None and not self._alone  # torch moves pickled objects to the GPU for a group of NCCL

    def _communicator(self, kind: str, ranks: tuple[int, ...]) -> Communicator:
        """kind: "group" or "pair". A group of two has one of each."""
        if (kind, ranks) not in self._communicators:
            store = dist.PrefixStore(f"{kind} {ranks}", self._own_store)
            member = Member(ranks, self._ranks[self._index], *declared_device())
            self._communicators[kind, ranks] = Communicator(store, member, self._patience_s)
        return self._communicators[kind, ranks]

    def _collective(self, name: str, *args: Any, **options: Any) -> dist.Work:
        def run(group: dist.ProcessGroup) -> dist.Work:
            return getattr(group, name)(*args, **options)

        if self._by_host():
            return run(self._host)
        operation = Collective(name, _about(name, [*args, *options.values()]), run, *_splits(name, args, len(self._ranks)))
        return UnderWay(self._communicator("group", self._ranks).enqueue(operation))

    # ---- messages -----------------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self._message(True, tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self._message(False, tensors, peer, tag)

    def _message(self, sends: bool, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        if self._by_host():
            return (self._host.send if sends else self._host.recv)(tensors, peer, tag)
        if self._batch:
            messages, done = self._batch
            messages.append(Message(sends, peer, tensors[0]))
            return UnderWay(done)
        pair = tuple(sorted((self._ranks[self._index], self._ranks[peer])))
        message = Message(sends, pair.index(self._ranks[peer]), tensors[0])
        return UnderWay(self._communicator("pair", pair).enqueue([message]))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Collect messages and give them to the group's communicator as one operation."""
        self._batch = messages, done = [], torch.futures.Future()
        try:
            yield
        finally:
            self._batch = None
        self._communicator("group", self._ranks).enqueue(messages, done)

    def recv_anysource(self, *_: Any) -> dist.Work:
        raise BrokenRule("recv_anysource: ProcessGroupNCCL has none")

    def allgather_coalesced(self, *_: Any) -> dist.Work:
        raise BrokenRule("allgather_coalesced: ProcessGroupNCCL has none")


def _method(name: str) -> Callable[..., dist.Work]:
    return lambda self, *args, **options: self._collective(name, *args, **options)


for _name in (*COMPARED, "all_to_all_single", "alltoall"):
    setattr(Group, _name, _method(_name))


def host_sender() -> str | None:
    """Return the module that sends host tensors by torch.distributed, one of HOST or torch's for pickled objects; else None."""
    frame = sys._getframe(1)
    while frame := frame.f_back:
        module = frame.f_globals.get("__name__", "")
        if module == distributed_c10d.__name__ and "object" in frame.f_code.co_name:
            return module
        if not module.startswith(("torch.", __name__)):
            return module if module in HOST else None
    return None


def _about(name: str, args: list[Any]) -> str:
    """Return the values that all ranks must give alike: reduction, root, types and numbers of elements."""
    words = [arg.reduceOp.op.name for arg in args if hasattr(arg, "reduceOp")]
    words += [f"root {arg.rootRank}" for arg in args if hasattr(arg, "rootRank")]
    if name not in COMPARED:
        words += sorted({str(tensor.dtype) for tensor in _tensors(args[:2])})
    elif COMPARED[name] is not None:
        held = [elements(tensor) for tensor in _tensors(args[COMPARED[name]])]
        words += held if len(held) <= MOST else [f"{len(held)} tensors ({zlib.crc32(' '.join(held).encode()):08x})"]
    return ", ".join(words)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)


def _splits(name: str, args: tuple, size: int) -> tuple[tuple[int, ...], ...]:
    """Return (elements to each rank, elements from each rank) of an all-to-all, else nothing."""
    if name == "alltoall":
        received, sent = ([tensor.numel() for tensor in tensors] for tensors in args[:2])
    elif name == "all_to_all_single":
        (received, sent) = (
            [rows * (tensor.numel() // max(1, len(tensor))) for rows in given or [len(tensor) // size] * size]
            for tensor, given in zip(args[:2], args[2:4], strict=True)
        )
    else:
        return ()
    return tuple(sent), tuple(received)


def declared_device() -> tuple[str, str]:
    """Return (this rank's node, the name of its GPU), by the pipeline's rule and the launcher's variables.

    Where the launcher shows no GPUs, each rank of a component has its own.
    """
    local_rank = int(os.environ["HETSTEP_LOCAL_RANK"])
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible:
        return os.environ["HETSTEP_NODE"], f"{os.environ['HETSTEP_COMPONENT']}:{local_rank}"
    with (
        unittest.mock.patch.object(torch.cuda, "is_available", lambda: True),
        unittest.mock.patch.object(torch.cuda, "device_count", lambda: len(visible)),
    ):
        device = world._device(SimpleNamespace(local_rank=local_rank))
    return os.environ["HETSTEP_NODE"], visible[device.index]
