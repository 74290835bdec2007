"""Transfers between real processes: received tensors equal the sent ones bit by bit, and faults are detected."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from pipeline.refit import endpoints, transfer
from pipeline.refit.transfer import TaggedTensors
from tests.refit import ranks
from tests.refit.ranks import AWKWARD, GENERATE, TRAIN, World

ONE, TWO = ((2, 3),), ((2,), (3,))  # engines
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# precision of train rank, wire and generate rank; engines, forwarding or not; bucket; from which size on nothing is staged
CASES = (
    (BF16, BF16, BF16, ONE, False, 2000, 64),
    (FP32, BF16, FP32, ONE, False, 1 << 16, 1 << 18),  # cast on both sides
    (FP32, FP32, FP32, TWO, False, 4000, 64),
    (BF16, FP16, FP32, TWO, True, 2000, 1 << 18),
    (BF16, BF16, BF16, TWO, True, 4000, 64),
)


def transfers(world: World, folder: Path, transport: str, cases: tuple = CASES) -> None:
    for train, wire, generate, engines, share, bucket_bytes, endpoints.DIRECT in cases:
        made = ranks.backends(AWKWARD, engines, train, generate, world.device)
        plan = ranks.planned(AWKWARD, made, engines, wire, bucket_bytes, share)
        assert share == any((part.sends.source >= 0).any() for part in plan.ranks.values())
        own = made[world.rank]
        refit = ranks.prepared(world, own, wire, transport, plan)
        for version in range(1, 6):
            full = {name: tensor.to(ranks.kept(name, wire)) for name, tensor in ranks.weights(AWKWARD, version, train).items()}
            if world.rank in TRAIN:
                own.fill(full)
            report = ranks.transfer(world, refit, own)
            ranks.agree(world, AWKWARD, plan, report, folder, version)
            if world.rank in GENERATE:
                own.commit(version)
                own.check(full)
                owned = own.owned(wire)
                if transport == "planned":
                    assert owned <= report.received <= owned + 6 * len(plan.ranks[world.rank].receives)  # padding
                elif version in (2, 3, 5):  # 3% have changed
                    headers = 8 * len(plan.ranks[world.rank].receives) + 16 * 2 * plan.ranks[world.rank].rounds
                    assert report.received < owned / 4 + headers


@pytest.mark.parametrize(
    ("transport", "cases"),
    [("planned", CASES), ("delta", CASES[3:4]), pytest.param("delta", CASES, marks=pytest.mark.full)],
    ids=["planned", "delta", "delta, all"],
)
def test_received_tensors_equal_the_sent_ones(transport, cases, tmp_path):
    ranks.run(functools.partial(transfers, cases=cases), tmp_path, transport)


def carried(world: World, folder: Path, transport: str) -> None:
    world.carrier = torch.device("cpu", 0)  # staging is forced for all tensors, so each message has a copy at either end
    copies = []
    copied = transfer.PeerChannel._carrier_memory
    transfer.PeerChannel._carrier_memory = lambda wire, tensor: copies.append(tensor) or copied(wire, tensor)
    transfers(world, folder, transport, CASES[3:4])  # with forwarding
    assert copies and all(copied(transfer.PeerChannel(world), tensor).data_ptr() != tensor.data_ptr() for tensor in copies)


@pytest.mark.parametrize("transport", ["planned", pytest.param("delta", marks=pytest.mark.long)])
def test_data_that_the_group_cannot_carry_is_staged_in_memory_that_it_can(transport, tmp_path):
    ranks.run(carried, tmp_path, transport)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="four ranks need a GPU each")
@pytest.mark.parametrize("transport", ["planned", "delta"])
def test_received_tensors_equal_the_sent_ones_over_nccl(transport, tmp_path):
    ranks.run(transfers, tmp_path, transport, cuda="apart")


# ---- faults -----------------------------------------------------------------------------------------------------------


EVIDENCE = {
    "flipped": re.compile("1 of 13 tensors did not arrive as they were sent: generate rank [23] differs in"),
    "cut": re.compile("of 13 tensors did not arrive as they were sent: generate rank [23] differs in"),
    "dropped": re.compile("Timed out waiting|by peer"),  # in a run this never times out; the watchdog names the phase
    "killed": re.compile("by peer"),
}


def spoil(fault: str) -> None:
    """Corrupt one later message of this process."""
    post = transfer.post
    posted = 0

    def spoiled(world: World, out: TaggedTensors, into: TaggedTensors):
        nonlocal posted
        if any(tensor.numel() > 64 for _, tensor, _ in out):  # not only a delta's header
            posted += 1
            if posted == 2:
                place = max(range(len(out)), key=lambda i: out[i][1].numel())
                peer, tensor, tag = out[place]
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                tensor = tensor.clone()
                tensor[-3] ^= 4
                half = tensor[: len(tensor) // 2]
                instead = {"flipped": [(peer, tensor, tag)], "cut": [(peer, half, tag)], "dropped": []}[fault]
                out = [*out[:place], *instead, *out[place + 1 :]]
        return post(world, out, into)

    transfer.post = spoiled


def two_refits(world: World, folder: Path, argument: tuple[str, str]) -> None:
    """Corrupt the second refit."""
    transport, fault = argument
    ranks.two_refits(world, folder, transport, 4000, lambda: spoil(fault) if world.rank == 1 else None)


WAITS = "dropped"  # until the timeout
FAULTS = [(fault, transport) for fault in ("flipped", WAITS, "cut", "killed") for transport in ("planned", "delta")]


@pytest.mark.parametrize(
    ("fault", "transport"), [pytest.param(*pair, marks=[pytest.mark.full] * (pair == (WAITS, "planned"))) for pair in FAULTS]
)
def test_a_corrupted_message_is_detected_and_never_served(fault, transport, tmp_path):
    ranks.run_to_the_end(two_refits, tmp_path, (transport, fault))
    seen = {rank: json.loads(path.read_text()) for rank in range(4) if (path := tmp_path / f"seen-{rank}").exists()}
    assert all(seen[rank]["served"] == 1 for rank in GENERATE if rank in seen)
    for rank, one in seen.items():
        assert EVIDENCE[fault].search(one["error"]), seen
        # Rank 0 ends because rank 1 was killed, and a receiver may have all of rank 1's data by then.
        senders = "from ranks? (0|1|0, 1)$" if fault == "killed" else "from ranks? (0, )?1$"
        assert re.search("to ranks? " if rank in TRAIN else senders, one["phase"]), seen
    assert 0 in seen and (fault == "dropped" or set(seen) == {0, 2, 3} | ({1} if fault != "killed" else set()))
