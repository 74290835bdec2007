"""Staging memory that ranks of one node share: the sender packs into its own memory, and the receivers read it in place.

On GPUs it is memory of the sender's device. Ranks that share this GPU, and ranks on other GPUs of the node (over NVLink or
PCIe), open it by CUDA IPC. On a CPU it is an anonymous file (memfd), which another process opens through the /proc of its
creator. Such a file leaves no name in /dev/shm, is not limited by the size of /dev/shm, and disappears with the last process
that maps it, however that process ends. When the ranks get their plan, they determine once which pairs of ranks can map memory.
The other pairs, on two nodes or in containers that hide their processes from each other, send over the process group.

`transfer.py` decides which rank may write or read at which time.

When torch shares CUDA memory, it creates a file of reference counters, 80 kB in /dev/shm. torch removes the file when the
sender exits, but not when the sender is killed.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from pipeline.job.world import World
from pipeline.refit.endpoints import ReceiveEndpoint, SendEndpoint
from pipeline.refit.transfer import post

logger = logging.getLogger(__name__)

BUFFERS = 2  # number of rounds that a sender stages at the same time
_EXPANDABLE = "expandable_segments"
_ELSEWHERE = "it is on another node"


class MemoryHandle(msgspec.Struct):
    """A handle with which another process maps a rank's memory."""

    node: str
    size: int  # bytes
    file: tuple[int, int, int, int] | None = (
        None  # (process, descriptor, the file's device, its inode); the last two prove its identity
    )
    cuda: tuple[bytes, int, int, bytes, int, bytes] | None = (
        None  # torch's handle of a shared storage, without device and event state
    )
    problem: str = ""  # why the memory cannot be mapped


class StagingOffer(msgspec.Struct):
    """A sender's message to a receiver: the handle of its staging memory and the offsets in it."""

    handle: MemoryHandle
    offsets: list[int]  # the receiver's part of `SendEndpoint.staging_offsets`


def share_staging(world: World, sends: SendEndpoint, receives: ReceiveEndpoint) -> None:
    """Allocate the staging memory of both endpoints, shared with all peers that can map it.

    Every rank of a plan calls this at the same time.
    """
    memory, handle, descriptor = _shareable(BUFFERS * sends.round_bytes, world.device, world.info.node)
    sends.allocate(BUFFERS, memory)
    offers = {peer: msgspec.msgpack.encode(StagingOffer(handle, offsets)) for peer, offsets in sends.staging_offsets().items()}
    with world.phase(f"share memory with ranks {_rank_list(sends.peers + receives.peers)}"):
        memories, answers = {}, {}
        for peer, body in _exchange(world, offers, receives.peers).items():
            offer = msgspec.msgpack.decode(body, type=StagingOffer)
            try:
                memories[peer] = (_map_memory(offer.handle, world.device, world.info.node), offer.offsets)
                answers[peer] = b""
            except (OSError, RuntimeError) as error:  # the pair uses messages instead
                answers[peer] = str(error).encode()
        problems = _exchange(world, answers, sends.peers)
    if descriptor is not None:
        os.close(descriptor)
    sends.mapped_peers = frozenset(peer for peer, problem in problems.items() if not problem)
    receives.read_from(memories)
    receives.allocate(BUFFERS)
    _log_unmapped(world, {peer: problem.decode() for peer, problem in problems.items()})


def _log_unmapped(world: World, problems: Mapping[int, str]) -> None:
    """Log the peers on this node that cannot map memory and get messages over the group. problems: peer -> error, or empty."""
    near = {peer: problem for peer, problem in problems.items() if problem and problem != _ELSEWHERE}
    if near:
        logger.info(
            f"refit: rank {world.rank} sends to ranks {_rank_list(near)} of its node through host memory"
            f" (policy.generation.colocated.refit=host), since they cannot map its memory: {next(iter(near.values()))}"
        )


# ---- memory -------------------------------------------------------------------------------------------------------------


def _shareable(size: int, device: torch.device, node: str) -> tuple[torch.Tensor, MemoryHandle, int | None]:
    """Allocate memory that other processes can map.

    Return (memory [size] uint8, its handle, descriptor to close after sharing). If the memory cannot be shared, it is plain
    memory and the handle holds the reason.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device), MemoryHandle(node, 0, problem="nothing is sent"), None
    try:
        if device.type == "cuda":
            with _inexpandable():
                memory = torch.empty(size, dtype=torch.uint8, device=device)
            _, *shared, _ = memory.untyped_storage()._share_cuda_()
            return memory, MemoryHandle(node, size, cuda=tuple(shared)), None
        descriptor = os.memfd_create("refit")
        os.ftruncate(descriptor, size)
        memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        about = os.fstat(descriptor)
        return memory, MemoryHandle(node, size, file=(os.getpid(), descriptor, about.st_dev, about.st_ino)), descriptor
    except (OSError, RuntimeError) as error:
        return torch.empty(size, dtype=torch.uint8, device=device), MemoryHandle(node, size, problem=str(error)), None


def _map_memory(handle: MemoryHandle, device: torch.device, node: str) -> torch.Tensor:
    """Map another rank's memory, [size] uint8. Raises OSError or RuntimeError if that is not possible."""
    if handle.node != node:
        raise OSError(_ELSEWHERE)
    if handle.cuda and device.type == "cuda":
        # CUDA maps memory of any GPU of the node that this rank's own device can reach, even if CUDA_VISIBLE_DEVICES hides it.
        # So the device's number here is not the sender's. No event is needed: a round is read after its notice.
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle.cuda, False)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    if handle.file and device.type == "cpu":
        process, descriptor, *identity = handle.file
        path = f"/proc/{process}/fd/{descriptor}"
        about = os.stat(path)
        if [about.st_dev, about.st_ino] != identity:
            raise OSError(f"{path} is another file here, as the two ranks have different PID namespaces")
        with open(path, "r+b", buffering=0) as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), handle.size), dtype=torch.uint8)
    raise OSError(handle.problem or f"expected memory of a {device.type} device")


@contextmanager
def _inexpandable() -> Iterator[None]:
    """Let torch allocate by cudaMalloc within the context.

    torch shares expandable segments through pidfd_getfd, which containers rarely permit. All allocator settings are written,
    since torch resets the settings that a new string does not name.
    """
    settings: dict[str, Any] = dict(torch.cuda.memory._snapshot())["allocator_settings"]
    if not settings.get(_EXPANDABLE):
        yield
        return
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    original = next((settings[name] for name in names if settings.get(name)), f"{_EXPANDABLE}:True")
    other_settings = [setting for setting in original.split(",") if not setting.strip().startswith(_EXPANDABLE)]
    torch._C._accelerator_setAllocatorSettings(",".join([*other_settings, f"{_EXPANDABLE}:False"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(original)


# ---- messages -----------------------------------------------------------------------------------------------------------


def _exchange(world: World, out: Mapping[int, bytes], into: Collection[int]) -> dict[int, bytes]:
    """Send bytes to each rank in `out`, and return rank -> the bytes that it sent, for the ranks in `into`."""
    lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in into}
    _pass(world, {peer: torch.tensor([len(body)]) for peer, body in out.items()}, lengths)
    bodies = {peer: torch.zeros(int(length), dtype=torch.uint8) for peer, length in lengths.items()}
    filled = {peer: torch.frombuffer(bytearray(body), dtype=torch.uint8) for peer, body in out.items() if body}
    _pass(world, filled, {peer: body for peer, body in bodies.items() if len(body)})
    return {peer: body.numpy().tobytes() for peer, body in bodies.items()}


def _pass(world: World, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]) -> None:
    tagged = ([(peer, tensor, 0) for peer, tensor in mail.items()] for mail in (out, into))
    for work in post(world, *tagged):
        work.wait()


def _rank_list(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))
