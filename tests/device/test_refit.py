"""Refits between GPUs: packing, encoding, decoding, writing and hashing mix no host tensor with the GPU's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeline.refit import endpoints, transfer
from pipeline.refit.digest import compare
from pipeline.refit.protocol import RefitReport
from tests.device.pretended import OnGPU, Pretending, pretended
from tests.refit import ranks
from tests.refit.ranks import AWKWARD, GENERATE, TRAIN, World

ONE, TWO = ((2, 3),), ((2,), (3,))  # engines
BF16, FP32 = torch.bfloat16, torch.float32
# precision of train rank, wire and generate rank; engines; whether they share a node; from which size on nothing is staged
CASES = (
    (BF16, BF16, BF16, ONE, False, 64),
    (FP32, BF16, FP32, TWO, True, 1 << 18),  # cast at both ends, and forwarded
)
VERSIONS = (1, 2)  # 3% of the values change in the second refit
PATIENCE_S = 60


class Way:
    """A one-way channel between ranks. The n-th post at one end belongs to the n-th at the other."""

    def __init__(self):
        self._sent: list[torch.Tensor] = []
        self._awaited = 0
        self._news = threading.Condition()

    def put(self, tensor: torch.Tensor) -> None:
        with self._news:
            self._sent.append(tensor.clone())
            self._news.notify_all()

    def number(self) -> int:
        self._awaited += 1
        return self._awaited - 1

    def take(self, number: int) -> torch.Tensor:
        with self._news:
            assert self._news.wait_for(lambda: len(self._sent) > number, PATIENCE_S)
            return self._sent[number]


class Arrival:
    def __init__(self, way: Way, tensor: torch.Tensor):
        self._way, self._tensor, self._number = way, tensor, way.number()

    def wait(self) -> None:
        self._tensor.copy_(self._way.take(self._number))


class Mail:
    """Stands in for the spanning group, between threads."""

    def __init__(self):
        self._ways = {(a, b): Way() for a in range(4) for b in range(4)}

    def post(self, world: World, out: transfer.TaggedTensors, into: transfer.TaggedTensors) -> list[Arrival]:
        assert all(isinstance(tensor, OnGPU) for _, tensor, _ in (*out, *into))
        for peer, tensor, _ in out:
            self._ways[world.rank, peer].put(tensor)
        return [Arrival(self._ways[peer, world.rank], tensor) for peer, tensor, _ in into]


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], id="in place", marks=pytest.mark.full), pytest.param(CASES[1], id="staged")]
)
@pytest.mark.parametrize("transport", ["planned", "delta"])
def test_all_tensors_stay_on_the_gpu(monkeypatch, transport, case):
    train, wire, generate, engines, share, direct = case
    monkeypatch.setattr(endpoints, "DIRECT", direct)
    monkeypatch.setattr(transfer, "post", Mail().post)
    full = [ranks.weights(AWKWARD, version, train) for version in VERSIONS]
    with pretended() as device:
        made = ranks.backends(AWKWARD, engines, train, generate, device)
        plan = ranks.planned(AWKWARD, made, engines, wire, 8000, share)

        def work(rank: int) -> list[RefitReport]:
            with Pretending():
                world, reports = World(rank, device, None, None, None), []
                refit = ranks.prepared(world, made[rank], wire, transport, plan)
                for version, weights in zip(VERSIONS, full, strict=True):
                    if rank in TRAIN:
                        made[rank].fill(weights)
                    reports.append(ranks.transfer(world, refit, made[rank]))
                    if rank in GENERATE:
                        made[rank].commit(version)
                        made[rank].check({name: tensor.to(ranks.kept(name, wire)) for name, tensor in weights.items()})
                return reports

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(work, rank) for rank in (*TRAIN, *GENERATE)]
            reports = [one.result() for one in done]
    for version, said in zip(VERSIONS, zip(*reports, strict=True), strict=True):
        by_rank = dict(enumerate(said))
        compare(plan, list(AWKWARD.shapes), {r: by_rank[r] for r in TRAIN}, {r: by_rank[r] for r in GENERATE}, version)
    if transport == "delta":
        assert reports[2][1].received < reports[2][0].received / 2
