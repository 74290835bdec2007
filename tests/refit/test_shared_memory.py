"""Refits within a node through shared memory: results equal the wire's bit by bit, and faults are detected."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from pipeline.refit import delta, full, shared_memory, transfer
from pipeline.refit.protocol import RefitReport
from tests.refit import ranks
from tests.refit.ranks import AWKWARD, GENERATE, TRAIN, World

ONE, TWO = ((2, 3),), ((2,), (3,))  # engines
BF16, FP32 = torch.bfloat16, torch.float32
CASES = (  # precision of train rank, wire and generate rank; engines, forwarding to each other or not; bucket
    (BF16, BF16, BF16, ONE, False, 1000),
    (FP32, BF16, FP32, TWO, True, 1000),
)
REFITS = 3


def both_ways(world: World, folder: Path, transport: str, cases: tuple = CASES, elsewhere: tuple[int, ...] = ()) -> None:
    """Run the same refits by wire and through shared memory. elsewhere: ranks on another node."""
    world.info.node = "other" if world.rank in elsewhere else "one"
    for train, wire, generate, engines, share, bucket_bytes in cases:
        made = ranks.backends(AWKWARD, engines, train, generate, world.device)
        plan = ranks.planned(AWKWARD, made, engines, wire, bucket_bytes, share)
        assert plan.ranks[world.rank].rounds > 4
        own = made[world.rank]
        refits = [ranks.prepared(world, own, wire, transport, plan, ipc=ipc) for ipc in (False, True)]
        _check_who_shares(world, refits[1], elsewhere)
        for version in range(1, REFITS + 1):
            weights = {
                name: tensor.to(ranks.kept(name, wire)) for name, tensor in ranks.weights(AWKWARD, version, train).items()
            }
            if world.rank in TRAIN:
                own.fill(weights)
            reports = []
            for i, refit in enumerate(refits):
                if world.rank in GENERATE and transport == "planned":
                    for tensor in own.live.values():
                        tensor.fill_(-7)  # nothing of the other refit's result is left
                reports.append(ranks.transfer(world, refit, own))
                ranks.agree(world, AWKWARD, plan, reports[-1], folder, 2 * version + i)
                if world.rank in GENERATE:
                    own.commit(version)
                    own.check(weights)
            _check_equal(*reports)


def _check_who_shares(world: World, refit, elsewhere: tuple[int, ...]) -> None:
    def maps(peer: int) -> bool:
        own, other = world.device.index, peer % max(1, torch.cuda.device_count())
        return world.device.type == "cpu" or own == other or torch.cuda.can_device_access_peer(own, other)

    def near(side) -> set[int]:
        return {peer for peer in side.peers if (peer in elsewhere) == (world.rank in elsewhere) and maps(peer)}

    for side in (refit._sends, refit._receives):
        assert set(side.mapped_peers) == near(side)
    if set(refit._receives.mapped_peers) == set(refit._receives.peers):
        assert refit._receives.round_bytes == 0  # data read in place needs no staging


def _check_equal(wire: RefitReport, shared: RefitReport) -> None:
    assert (wire.sent, wire.received) == (shared.sent, shared.received)
    assert (wire.keys == shared.keys).all() and (wire.hashes == shared.hashes).all()


@pytest.mark.parametrize("transport", ["planned", pytest.param("delta", marks=pytest.mark.full)])
def test_shared_memory_gives_the_same_weights_as_the_wire(transport, tmp_path):
    ranks.run(both_ways, tmp_path, transport)


def across_nodes(world: World, folder: Path, transport: str) -> None:
    both_ways(world, folder, transport, elsewhere=(1, 3))


@pytest.mark.parametrize("transport", ["planned", pytest.param("delta", marks=pytest.mark.full)])
def test_the_wire_is_used_between_nodes(transport, tmp_path):
    ranks.run(across_nodes, tmp_path, transport)


def _delay(world: World) -> None:
    """On a GPU delay the stream, not this thread."""
    if world.device.type == "cuda":
        torch.cuda._sleep(50_000_000)  # cycles
    else:
        time.sleep(0.02)


def slow(world: World, folder: Path, transport: str) -> None:
    """Delay train ranks' packing and generate ranks' reading at different times.

    A sender that did not wait would overwrite data that is being read; a reader that did not wait would read data that is not
    there yet.
    """
    kind, pack = (delta.DeltaEncoding, "_encode") if transport == "delta" else (full.FullEncoding, "_gather")
    name = pack if world.rank in TRAIN else "apply"
    work, times = getattr(kind, name), []

    def late(*arguments):
        times.append(time.monotonic())
        if len(times) % 3 == world.rank % 3:
            _delay(world)
        return work(*arguments)

    setattr(kind, name, late)
    both_ways(world, folder, transport, CASES[1:])


@pytest.mark.parametrize("transport", ["planned", pytest.param("delta", marks=pytest.mark.full)])
def test_neither_end_overtakes_a_slow_one(transport, tmp_path):
    ranks.run(slow, tmp_path, transport)


# ---- GPUs -------------------------------------------------------------------------------------------------------------


on_gpus = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which all ranks share")


@pytest.mark.gpu
@on_gpus
@pytest.mark.parametrize("transport", ["planned", "delta"])
def test_shared_memory_gives_the_same_weights_as_the_wire_on_gpus(transport, tmp_path):
    ranks.run(both_ways, tmp_path, transport, cuda="shared")


@pytest.mark.gpu
@on_gpus
@pytest.mark.parametrize("transport", ["planned", "delta"])
def test_neither_stream_overtakes_a_slow_one(transport, tmp_path):
    ranks.run(slow, tmp_path, transport, cuda="shared")


def expandable(world: World, folder: Path, transport: str) -> None:
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512,expandable_segments:True")
    both_ways(world, folder, transport, CASES[:1])
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["expandable_segments"] and settings["max_split_size"] == 512 << 20


@pytest.mark.gpu
@on_gpus
def test_expandable_segments_do_not_prevent_sharing(tmp_path):
    ranks.run(expandable, tmp_path, "planned", cuda="shared")


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"expandable_segments": False, "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, []),
        (
            {
                "expandable_segments": True,
                "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2], expandable_segments:True",
            },
            [
                "roundup_power2_divisions:[256:1,512:2],expandable_segments:False",
                "roundup_power2_divisions:[256:1,512:2], expandable_segments:True",
            ],
        ),
        ({"expandable_segments": True}, ["expandable_segments:False", "expandable_segments:True"]),
    ],
    ids=["off", "among others", "alone"],
)
def test_shared_memory_does_not_use_expandable_segments(settings, written, monkeypatch):
    """The allocator's other settings stay."""
    given: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": settings})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    with shared_memory._inexpandable():
        assert given == written[:1]
    assert given == written


# ---- pairs that cannot share memory -----------------------------------------------------------------------------------


def unable(world: World, folder: Path, whose: str) -> None:
    """Make one rank unable to share its memory, or another unable to map it."""

    def refused(*_, **__):
        raise OSError("not allowed here")

    if whose == "sender" and world.rank == 1:
        os.memfd_create = refused
    if whose == "receiver" and world.rank == 3:
        shared_memory._map_memory = refused
    made = ranks.backends(AWKWARD, ONE, BF16, BF16, world.device)
    plan = ranks.planned(AWKWARD, made, ONE, BF16, 1000)
    own = made[world.rank]
    said = io.StringIO()
    logger = logging.getLogger("pipeline")
    logger.addHandler(logging.StreamHandler(said))
    logger.setLevel(logging.INFO)
    refit = ranks.prepared(world, own, BF16, "planned", plan, ipc=True)
    refused_by = {"sender": {1: GENERATE}, "receiver": {0: (3,), 1: (3,)}}[whose].get(world.rank, ())
    assert set(refit._sends.mapped_peers) == set(refit._sends.peers) - set(refused_by)
    words = f"rank {world.rank} sends to ranks {', '.join(map(str, refused_by))} of its node through host memory"
    assert said.getvalue() == "" if not refused_by else words in said.getvalue() and "not allowed here" in said.getvalue()
    weights = ranks.weights(AWKWARD, 1, BF16)
    if world.rank in TRAIN:
        own.fill(weights)
    ranks.agree(world, AWKWARD, plan, ranks.transfer(world, refit, own), folder, 1)
    if world.rank in GENERATE:
        own.commit(1)
        own.check(weights)


@pytest.mark.parametrize("whose", ["sender", "receiver"])
def test_a_pair_that_cannot_share_logs_it_and_uses_the_wire(whose, tmp_path):
    ranks.run(unable, tmp_path, whose)


def another_process(world: World, folder: Path, argument: None) -> None:
    """Return the memory file of a process whose number means another process here, as in a container with its own numbers."""
    memory, handle, descriptor = shared_memory._shareable(64, world.device, "one")
    assert os.fstat(descriptor).st_nlink == 0  # the file has no name, so a killed process leaves none
    memory.fill_(3)
    assert shared_memory._map_memory(handle, world.device, "one").tolist() == [3] * 64
    process, number, device, inode = handle.file
    with pytest.raises(OSError, match="have different PID namespaces"):
        handle.file = (process, number, device, inode + 1)
        shared_memory._map_memory(handle, world.device, "one")
    os.close(descriptor)


def test_memory_is_not_taken_for_another_processs(tmp_path):
    ranks.run(another_process, tmp_path)


# ---- faults -----------------------------------------------------------------------------------------------------------


def two_refits(world: World, folder: Path, argument: tuple[str, str]) -> None:
    """Fail the second refit."""
    transport, fault = argument
    ranks.two_refits(world, folder, transport, 2000, lambda: _break(world, fault), ipc=True)


def _break(world: World, fault: str) -> None:
    """Make train rank 1 corrupt its packed data or die after packing, or generate rank 3 die while it reads."""
    if fault == "spoiled memory" and world.rank == 1:
        post_round = transfer.PeerChannel.post_round

        def spoiled(
            wire: transfer.PeerChannel, out: transfer.PeerTensors, into: transfer.PeerTensors
        ) -> transfer.PendingMessages:
            max((tensor for _, tensor in out), key=len)[-3] ^= 4  # the data is in the shared memory
            return post_round(wire, out, into)

        transfer.PeerChannel.post_round = spoiled
    if fault == "killed sender" and world.rank == 1:
        transfer.PeerChannel._notices = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if fault == "killed reader" and world.rank == 3:
        acknowledge, rounds = transfer.PeerChannel.acknowledge, []

        def broken(wire: transfer.PeerChannel, posted: transfer.PendingMessages) -> None:
            rounds.append(posted)
            if len(rounds) > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            acknowledge(wire, posted)

        transfer.PeerChannel.acknowledge = broken


EVIDENCE = {
    "spoiled memory": re.compile("of 13 tensors did not arrive as they were sent: generate rank [23] differs in"),
    "killed sender": re.compile("by peer"),
    "killed reader": re.compile("by peer"),
}
DEAD = {"killed sender": {1}, "killed reader": {3}}


@pytest.mark.parametrize("transport", ["planned", pytest.param("delta", marks=pytest.mark.full)])
@pytest.mark.parametrize("fault", list(EVIDENCE))
def test_a_fault_is_detected_and_never_served(fault, transport, tmp_path):
    ranks.run_to_the_end(two_refits, tmp_path, (transport, fault))
    seen = {rank: json.loads(path.read_text()) for rank in range(4) if (path := tmp_path / f"seen-{rank}").exists()}
    assert set(seen) == {0, 1, 2, 3} - DEAD.get(fault, set())
    assert all(seen[rank]["served"] == 1 for rank in GENERATE if rank in seen)
    assert any(EVIDENCE[fault].search(one["error"]) for one in seen.values()) and all(one["error"] for one in seen.values()), (
        seen
    )
    waits = {"killed sender": (GENERATE, "from ranks? (0, )?1$"), "killed reader": (TRAIN, "to ranks? (2, )?3$")}
    for rank in waits.get(fault, ((), ""))[0]:
        assert re.match(r"round \d+ of \d+, " + waits[fault][1], seen[rank]["phase"]), seen
