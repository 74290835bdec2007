"""Run one rank of a small world with a role made for the tests: `python -m tests.world.ranks RUN_DIR SCENARIO`."""

import ctypes
import os
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pipeline.config import TimeoutsConfig
from pipeline.job.watchdog import Watchdog
from pipeline.job.world import RankInfo, WorkerGroups, World, connect, join, leave, open_store, wait_for_all
from pipeline.rpc import RpcClient, RpcGroup, serve, stop, verb
from tests.world import visited

WORKERS = WorkerGroups(train=(0, 1), generate=(2, 3, 4), engines=((2, 3), (4,)), reward=(5, 6))
TIMEOUTS = TimeoutsConfig(join=100, silence=4, train=5)
HELD_S = 7


@dataclass(frozen=True)
class Message:
    array: np.ndarray
    text: str


class Role(visited.Verbs):
    def __init__(self, world: World):
        self.world = world

    @verb("setup")
    def double(self, message: Message) -> Message:
        return Message(message.array * 2, f"{message.text}{self.world.rank}")

    @verb("setup")
    def realm(self) -> list[int]:
        """Return the default group's size and the realms of its ranks."""
        ranks = torch.zeros(7, dtype=torch.int64)
        ranks[self.world.rank] = 1
        dist.all_reduce(ranks)
        return [dist.get_world_size(), *ranks.tolist()]

    @verb("setup")
    def broadcast(self) -> float:
        value = torch.full((3,), 7.0 if self.world.rank == 0 else 0.0)
        dist.broadcast(value, src=0, group=self.world.refit)
        return float(value.sum())

    @verb("setup")
    def setup(self) -> None:
        """Hold the GIL longer than `silence` on rank 0 and rank 3, as a slow import does."""
        if self.world.rank in (0, 3):
            ctypes.PyDLL(None).sleep(HELD_S)

    @verb("setup")
    def waits(self) -> list[float]:
        """Return the timeouts, in days, of groups that FSDP's mesh and vLLM make."""
        size = dist.get_world_size()
        if self.world.component == "train":
            groups = [init_device_mesh("cpu", (1, size)).get_group(dim) for dim in (0, 1)]
        else:
            from vllm.distributed.parallel_state import GroupCoordinator

            made = GroupCoordinator([[*range(size)]], 0, "gloo", use_device_communicator=False)
            groups = [made.device_group, made.cpu_group]
        return [group._get_backend(torch.device("cpu")).options._timeout.days for group in groups]

    @verb("train")
    def hang(self) -> None:
        with self.world.phase("decode"):
            if self.world.rank in (4, 6):
                time.sleep(600)

    @verb("setup")
    def linger(self) -> None:
        with self.world.phase("decode"):
            time.sleep(600)

    @verb("setup")
    def reduce(self) -> None:
        """Block forever: rank 3 and the train realm take no part."""
        if self.world.rank == 3:
            (self.world.info.folder / "pid3").write_text(str(os.getpid()))
            time.sleep(600)
        dist.all_reduce(torch.zeros(1), group=self.world.spanning)

    @verb("setup")
    def fail(self) -> None:
        if self.world.rank == 3:
            (self.world.info.folder / "raised").write_text(str(time.time()))
            raise ValueError("the engine is on fire")

    def secret(self) -> None:
        raise AssertionError("not a verb")


def check(train: RpcGroup[Role], generate: RpcGroup[Role], reward: RpcGroup[Role]) -> None:
    replies = generate.call(Role.double, Message(np.arange(3, dtype=np.int32), "rank ")).result()
    assert [reply.text for reply in replies] == ["rank 2", "rank 3", "rank 4"]
    assert all(reply.array.tolist() == [0, 2, 4] and reply.array.dtype == np.int32 for reply in replies)
    same = Message(np.random.default_rng(9).random((1000, 400)), "same")  # one body, forwarded from rank to rank
    for i, reply in enumerate(generate.call(Role.double, same).result()):
        assert reply.text == f"same{i + 2}" and (reply.array == same.array * 2).all()
    large = [np.random.default_rng(i).random((1000, 300 + i)) for i in range(3)]  # above INLINE
    ahead = [generate.scatter(Role.double, [Message(array, str(turn)) for array in large]) for turn in range(3)]
    scored = reward.call(Role.realm)
    assert train.call(Role.realm).result() == [[2, 1, 1, 0, 0, 0, 0, 0]] * 2  # a collective while bodies are under way
    assert scored.result() == [[2, 0, 0, 0, 0, 0, 1, 1]] * 2
    for turn, future in enumerate(ahead):
        for i, reply in enumerate(future.result()):
            assert reply.text == f"{turn}{i + 2}"
            assert (reply.array == large[i] * 2).all()
    first, second = [2, 0, 0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0]
    assert generate.call(Role.realm).result() == [first, first, second]
    received = generate.call(Role.broadcast)
    dist.broadcast(torch.full((3,), 7.0), src=0, group=train._world.refit)
    assert received.result() == [21.0] * 3
    try:
        generate.call(Role.secret)
    except AttributeError as error:
        assert "not a verb" in str(error)
    else:
        raise AssertionError("a method that is no verb was called")
    print("checked", flush=True)


def main(run_dir: Path, scenario: str, timeouts: TimeoutsConfig = TIMEOUTS) -> None:
    timeouts = replace(timeouts, join=float(os.environ.get("JOIN_S", timeouts.join)))
    info = RankInfo.from_environment(run_dir)
    workers = replace(WORKERS, reward=tuple(range(5, info.size)))
    if scenario == "absent" and info.rank == 3:
        return
    store = open_store(info, timeouts.join, timeouts.silence, int(os.environ.get("RELAYED_FROM", 256)))
    world = World(info, workers, store)
    client = RpcClient(world) if world.rank == 0 else None
    watchdog = Watchdog(world, timeouts, *([client.overdue] if client else []))
    try:
        watchdog.start()
        wait_for_all(world, 3 if scenario == "absent" else timeouts.join)
        if world.rank == 3 and "HELD" in os.environ:
            visited.wait_for(run_dir / "entered")
        if "SPARSE" in os.environ:
            visited.join_sparsely(world)  # such a world connects over NCCL
        else:
            join(world)
            connect(world)
        role = Role(world)
        if not client:
            serve(world, role)
        else:
            train = RpcGroup(client, world, workers.train, Role, timeouts, role)
            generate = RpcGroup(client, world, workers.generate, Role, timeouts)
            reward = RpcGroup(client, world, workers.reward, Role, timeouts)
            if scenario.startswith("visited "):
                engine = RpcGroup(client, world, workers.engines[0], Role, timeouts)
                visited.coordinate(run_dir, train, generate, reward, engine, scenario.removeprefix("visited "))
            elif scenario == "check":
                check(train, generate, reward)
                both = train.call(Role.waits), generate.call(Role.waits)
                assert [future.result() for future in both] == [[[365] * 2] * 2, [[365] * 2] * 3]
            elif scenario == "loading":
                for future in [generate.call(Role.setup), train.call(Role.setup)]:
                    future.result()
            elif scenario == "fail":
                generate.call(Role.fail).result()
            elif scenario.startswith("hang"):
                (reward if scenario == "hang-reward" else generate).call(Role.hang).result()
            elif scenario == "strangers":
                print("store", store.process.pid, "ready", flush=True)
                while not (run_dir / "enough").exists():
                    check(train, generate, reward)
            elif scenario == "reduce":
                future = generate.call(Role.reduce)
                reward.call(Role.reduce)
                while not (info.folder / "pid3").exists():
                    time.sleep(0.05)
                print("ready", flush=True)
                future.result()
            else:
                both = [generate.call(Role.linger), reward.call(Role.linger)]
                print("store", store.process.pid, "ready", flush=True)
                both[0].result()
            stop(world)
    except Exception as error:
        watchdog.fail(error)
        traceback.print_exc()
        os._exit(1)
    if "SLOW_END" in os.environ and world.store.relay and not world.store.relay_process:
        time.sleep(2)
    watchdog.stop()
    leave(world, timeouts.silence)
    os._exit(0)


def in_job(run_dir: str, scenario: str) -> None:
    """Return what executors run."""
    main(Path(run_dir), scenario, TimeoutsConfig(join=100))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
