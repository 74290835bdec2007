"""Measure what a verb costs rank 0 and its store, by the number of ranks: `python -m tests.benchmarks.verbs`.

Rank 0's end, the store's process and the relays (one for 8 ranks, from 256 ranks on) are the real ones. Two
processes stand for all other ranks (`stand_in.py`). Bodies that go over the spanning group go over one connection to each such
process; what ranks hand on to each other is left out. Printed, for each number of ranks: seconds, messages and megabytes at the
store, and the seconds of CPU of rank 0, of the store, and of the other processes, which a cluster has on its other nodes.

    node     before all: a verb to one node, through a relay's own process to ranks that really serve
    join     from the start of the others until rank 0 has seen all
    verb     to all ranks, which have nothing to say
    data     to all ranks: a step of 2,048 samples of 1,536 tokens, shared by groups of 8 ranks (tensor-parallel)
    step     half of the ranks train, half generate by engines of 8: a step's verbs, with groups of answers
    hang     how late a rank is named that does not answer; and what heartbeats cost

On two busy cores (load 7 to 12), before (a queue for each rank, a reply of each) and after: seconds, CPU seconds of rank 0 and
its store, messages.

    ranks       64                    512                    2,048                    8,192
    verb before 0.031  0.018    252   0.80  0.19    2,044    1.56  1.04     8,188    10.9   6.1     32,764
         after  0.004  0.003     65   0.009 0.003      72    0.023 0.012      280     0.16  0.040    1,119
    data before 1.03   0.39     252   38    3.0     2,044    3.9   2.8      8,188    22.9   7.9     32,764
         after  0.49   0.035     86   0.16  0.025      72    0.21  0.042      351     0.58  0.27     1,442
    step before 1.57   0.50   1,136   2.2   0.97    9,256    8.1   5.2     37,096    48     20.5   148,456
         after  0.66   0.066    361   0.26  0.054     429    0.32  0.13     1,583     1.5    0.47     6,421

What is left is a system call for each relay, down and up: 37 ms of the store for 1,024 of them, of which the proofs' HMAC takes
a tenth. Before, rank 0 sent 328 MB of samples to any number of ranks, now 41 MB.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from pipeline.config import TimeoutsConfig
from pipeline.data.packing import plan_microbatches
from pipeline.files.encoding import encode
from pipeline.job.watchdog import Watchdog
from pipeline.job.world import RELAYED_FROM, RankInfo, WorkerGroups, World, heartbeat_interval_s, wait_for_all
from pipeline.refit.protocol import Commit, RefitReport
from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork
from pipeline.rpc import RpcClient, RpcGroup, StreamingReply, calls, serve, stop, verb
from pipeline.store import relay
from pipeline.store.child_process import start
from pipeline.store.client import RunStore
from pipeline.types import (
    AdvantageNormalization,
    Completion,
    GlobalCounts,
    Moments,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    Sampling,
    Turn,
    Update,
    VersionSpan,
)
from tests.benchmarks.stand_in import TOGETHER, Counted

SIZES = (64, 512, 2048, 8192)
PROCESSES = 2
SAMPLES, LENGTH = 2048, 1536
BEATS_S = 10.0
PROMPT = Prompt(0, np.arange(512, dtype=np.int32), "math", {"answer": "42"})


@dataclass
class Timeouts:
    any: float = 600.0
    short: float = 2.0


class Role:
    """The verbs that are called on the ranks."""

    @verb("any")
    def nothing(self) -> None: ...

    @verb("short")
    def hang(self) -> None: ...

    @verb("any")
    def load(self, updates: list[Update]) -> None: ...

    @verb("any")
    def forward(self) -> None: ...

    @verb("any")
    def estimate(self) -> list[Moments]: ...

    @verb("any")
    def standardize(self, to: AdvantageNormalization) -> None: ...

    @verb("any")
    def step(self, models: list[str]) -> dict[str, list[dict[str, float]]]: ...

    @verb("any")
    def send(self) -> RefitReport: ...

    @verb("any")
    def receive(self) -> RefitReport: ...

    @verb("any")
    def commit(self, commit: Commit) -> None: ...

    @verb("any")
    def rollout(self, work: RolloutWork) -> StreamingReply[FinishedGroup]: ...


class Own(Role):
    """Rank 0's own role, which does nothing."""

    def estimate(self) -> list[Moments]:
        return []


def _answers() -> dict[str, list[list[Any]]]:
    """Return verb -> [body, whether more follow], in hex. Bodies that differ by rank are made in the other processes."""
    completion = Completion("", np.zeros(8, np.int32), np.zeros(8, np.float32), (VersionSpan(1, 8),), "stop")
    group = RolloutGroup(PROMPT, (Rollout((Turn(completion),), 1.0),))
    metrics = {f"metric_{i}": 0.1 * i for i in range(20)}
    answers: dict[str, list[list[Any]]] = {
        "step": [[{"policy": [metrics]}, False]],
        "rollout": [[[{"group_index": 0, "group": group}], True], [[{"group_index": 1, "group": group}], False]],
    }
    return {name: [[encode(body).hex(), more] for body, more in parts] for name, parts in answers.items()}


class Bodies:
    """Stands in for the spanning group."""

    sockets: ClassVar[list[socket.socket]] = []
    bytes: ClassVar[int] = 0

    @classmethod
    def send(cls, world: World, body: torch.Tensor, call: int, to: int) -> None:
        cls.bytes += len(body)
        cls.sockets[to % len(cls.sockets)].sendall(memoryview(body.numpy()))


class Simulation:
    def __init__(self, size: int, folder: Path):
        self.size = size
        key = os.urandom(32)
        self.process, self.address = start("127.0.0.1", key)
        half = size // 2
        engines = tuple(tuple(range(i, i + TOGETHER)) for i in range(half, size, TOGETHER))
        self.workers = WorkerGroups(tuple(range(half)), tuple(range(half, size)), engines)
        place = RankInfo(0, size, 0, "node0", "127.0.0.1", folder / "attempts/1")
        self.world = World(place, self.workers, RunStore(self.address, key, 60))
        begun = time.perf_counter()
        self.others = [self._stand_in(number, key) for number in range(PROCESSES)]
        wait_for_all(self.world, 600)
        self.join_s = time.perf_counter() - begun
        ports = [int(other.stdout.readline()) for other in self.others]
        Bodies.sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        calls.send_body = Bodies.send
        self.client = RpcClient(self.world)
        own = Own()
        self.all = self._remote(tuple(range(size)), own)
        self.train = self._remote(self.workers.train, own)
        self.generate = self._remote(self.workers.generate)
        self.engines = [self._remote(engine) for engine in engines]

    def _remote(self, ranks: tuple[int, ...], role: Any = None) -> RpcGroup[Role]:
        return RpcGroup(self.client, self.world, ranks, Role, Timeouts(), role)

    def _stand_in(self, number: int, key: bytes) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.benchmarks.stand_in"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told = {
            "host": self.address.host,
            "port": self.address.port,
            "key": key.hex(),
            "nodes": self._nodes()[number::PROCESSES],
            "leaders": [engine[0] for engine in self.workers.engines],
            "answers": _answers(),
            "interval_s": heartbeat_interval_s(self.size, TimeoutsConfig().silence),
        }
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        return process

    def _nodes(self) -> list[list[int]]:
        """Return the ranks behind each relay. Ranks on rank 0's node, and all of a small world, count as having one each."""
        together = TOGETHER if self.size >= RELAYED_FROM else 1
        nodes = [list(range(first, first + together)) for first in range(together, self.size, together)]
        return [[rank] for rank in range(1, together)] + nodes

    def counts(self) -> dict[str, float]:
        """Return the totals of all processes so far."""
        total = {"requests": Counted.requests, "sent": Counted.sent, "received": Counted.received, "cpu": 0.0}
        for other in self.others:
            other.stdin.write("\n")
            other.stdin.flush()
            for name, value in json.loads(other.stdout.readline()).items():
                total[name] += value
        return {
            "requests": total["requests"],
            "megabytes": (total["sent"] + total["received"]) / 1e6,
            "bodies": Bodies.bytes / 1e6,
            "others": total["cpu"],
            "rank 0": time.process_time(),
            "store": _cpu(self.process.pid),
        }

    def close(self) -> None:
        for other in self.others:
            other.stdin.close()
            other.wait(60)
        self.process.stdin.close()
        self.process.wait(60)


def _cpu(pid: int) -> float:
    """Return CPU seconds; proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- measurements ---------------------------------------------------------------------------------------------------------


def parts(ranks: int) -> list[list[Update]]:
    """Return one rank's share for each, equal for TOGETHER successive ranks, like `pipeline.data.batches.split_batch`."""
    places = max(1, ranks // TOGETHER)
    tokens = np.arange(LENGTH, dtype=np.int32)
    mask, numbers = np.ones(LENGTH, np.bool_), np.ones(LENGTH, np.float32)
    sample = Sample(tokens, mask, numbers, numbers, 1.0)
    shares = []
    for place in range(places):
        members = range(place, SAMPLES, places)
        cut = plan_microbatches([LENGTH] * len(members), 1, 8 * LENGTH, None)[0] if members else []
        shares.append([Update([sample] * len(members), cut, cut, GlobalCounts(1, 1))])
    return [shares[rank // TOGETHER % places] for rank in range(ranks)]


def step(simulation: Simulation, shares: list[list[Update]]) -> None:
    train, generate = simulation.train, simulation.generate
    works = [
        engine.call(Role.rollout, RolloutWork(i, [PROMPT] * 2, 16, "train", 1, Sampling()))
        for i, engine in enumerate(simulation.engines)
    ]
    for work in works:
        work.result()
    train.scatter(Role.load, shares).result()
    train.call(Role.forward).result()
    train.call(Role.estimate).result()
    train.call(Role.standardize, AdvantageNormalization(0.0, 1.0, [])).result()
    train.call(Role.step, ["policy"]).result()
    receiving = generate.call(Role.receive)
    train.call(Role.send).result()
    receiving.result()
    generate.call(Role.commit, Commit(1)).result()


def hang(simulation: Simulation) -> str:
    """Measure a verb that one rank does not answer."""
    future = simulation.all.call(Role.hang)
    while not (late := simulation.client.overdue()):
        time.sleep(0.01)
    return f"{late.missing} of verb {late.verb} named {time.monotonic() - future.deadline:.3f} s after its time"


def beats(simulation: Simulation) -> str:
    """Measure the store without calls: heartbeats, and rank 0's check of all of them."""
    watchdog = Watchdog(simulation.world, TimeoutsConfig())
    watchdog.start()
    time.sleep(2)
    before = simulation.counts()
    time.sleep(BEATS_S)
    spent = {key: (value - before[key]) / BEATS_S for key, value in simulation.counts().items()}
    watchdog.stop()
    heard = len(watchdog.activities())
    cpu = f"rank 0 {spent['rank 0']:.3f}, store {spent['store']:.3f}"
    return f"heartbeats of {heard}: {spent['requests']:.0f} messages/s; CPU s/s: {cpu}"


def measure(size: int) -> None:
    """Print this size's rows: the fastest of several turns, and means of messages and CPU seconds."""
    Counted.install()
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(size, Path(folder))
        everyone, half = parts(size), parts(size // 2)
        simulation.all.call(Role.nothing).result()
        measured = {
            "verb": (20, lambda: simulation.all.call(Role.nothing).result()),
            "data": (3, lambda: simulation.all.scatter(Role.load, everyone).result()),
            "step": (3, lambda: step(simulation, half)),
        }
        print(f"{size:5} ranks: join {simulation.join_s:.2f} s", flush=True)
        for name, (turns, work) in measured.items():
            before, times = simulation.counts(), []
            for _ in range(turns):
                begun = time.perf_counter()
                work()
                times.append(time.perf_counter() - begun)
            spent = {key: (value - before[key]) / turns for key, value in simulation.counts().items()}
            cpu = ", ".join(f"{key} {spent[key]:.3f}" for key in ("rank 0", "store", "others"))
            sent = f"{spent['requests']:.0f} messages, {spent['megabytes']:.2f} MB and {spent['bodies']:.0f} MB of bodies"
            print(f"{size:5} ranks: {name} {min(times):.3f} s, {sent}; CPU s: {cpu}", flush=True)
        print(f"{size:5} ranks: {hang(simulation)}; {beats(simulation)}", flush=True)
        simulation.close()


def node() -> str:
    """Measure a verb through a relay's own process to the ranks of its node, which really serve here, in threads."""
    key, ranks = os.urandom(32), tuple(range(1, TOGETHER + 1))
    process, address = start("127.0.0.1", key)
    workers = WorkerGroups((0, *ranks), (), ())
    with tempfile.TemporaryDirectory() as folder:
        worlds = [
            World(RankInfo(rank, len(ranks) + 1, rank, "node", "127.0.0.1", Path(folder)), workers, RunStore(address, key, 60))
            for rank in workers.train
        ]
        relaying, near = relay.start(address, key, ranks[0], 1.0, 60.0)
        for world in worlds[1:]:
            world.store.relay = near
        threads = [threading.Thread(target=serve, args=(world, Role())) for world in worlds[1:]]
        for thread in threads:
            thread.start()
        remote, times = RpcGroup(RpcClient(worlds[0]), worlds[0], ranks, Role, Timeouts()), []
        for _ in range(50):
            begun = time.perf_counter()
            remote.call(Role.nothing).result()
            times.append(time.perf_counter() - begun)
        stop(worlds[0])
        for thread in threads:
            thread.join(60)
    for each in (relaying, process):
        each.stdin.close()
        each.wait(60)
    return f"one node of {len(ranks)} ranks: verb {min(times):.4f} s, half of them within {sorted(times)[25]:.4f} s"


def main() -> None:
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
        return
    print(node(), flush=True)
    for size in SIZES:
        subprocess.run([sys.executable, "-m", "tests.benchmarks.verbs", str(size)], check=True)


if __name__ == "__main__":
    main()
