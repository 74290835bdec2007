"""World, remote and watchdog over seven real processes of three realms: messages, and errors that name who, what and where."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import config
from pipeline.world import Realms
from tests.launch.model import write_recipe

ROOT = Path(__file__).parents[2]
SIZE = 7


class World:
    """The ranks of `tests.world.ranks`."""

    def __init__(self, run_dir: Path, scenario: str):
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        self.logs = [run_dir / f"{rank}.log" for rank in range(SIZE)]
        self.processes = [self._start(rank, scenario) for rank in range(SIZE)]

    def _start(self, rank: int, scenario: str) -> subprocess.Popen:
        env = os.environ | {
            "HETSTEP_RANK": str(rank),
            "HETSTEP_WORLD_SIZE": str(SIZE),
            "HETSTEP_LOCAL_RANK": str(rank),
            "HETSTEP_NODE": f"node{rank}",
            "HETSTEP_MASTER_ADDR": "127.0.0.1",
            "HETSTEP_ATTEMPT": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, "-m", "tests.world.ranks", str(self.run_dir), scenario]
        with open(self.logs[rank], "w") as log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    def wait(self, timeout: float = 60) -> list[int]:
        deadline = time.monotonic() + timeout
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def until(self, text: str, rank: int = 0) -> None:
        deadline = time.monotonic() + 60
        while text not in self.logs[rank].read_text():
            assert time.monotonic() < deadline, self.logs[rank].read_text()
            time.sleep(0.05)

    def failure(self) -> dict:
        return json.loads(next(self.run_dir.glob("attempts/*/failure.json")).read_text())


@pytest.fixture
def start(tmp_path):
    worlds = []

    def begin(scenario):
        worlds.append(World(tmp_path / scenario, scenario))
        return worlds[-1]

    yield begin
    for world in worlds:
        for process in world.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def test_the_realms_of_a_recipe(tmp_path):
    """Ranks in the order train, generate, reward; the latter only for a reward model with ranks of its own."""
    judged = {"judge": {"kind": "reward_model", "model_name": "some/where"}, "math": {"kind": "math"}}
    ranks = {"train": {"nodes": 2}, "generate": {"ranks_per_node": 3}, "reward": {"nodes": 2}, "executor": "local"}
    path = str(write_recipe(tmp_path, env=judged, cluster=ranks))
    assert Realms.of(config.load(path)) == Realms((0, 1), (2, 3, 4), ((2,), (3,), (4,)))
    realms = Realms.of(config.load(path, ["env.judge.served_by=reward"]))
    assert realms == Realms((0, 1), (2, 3, 4), ((2,), (3,), (4,)), reward=(5, 6))
    assert [realms.name(rank) for rank in (1, 2, 4, 5, 6)] == ["train", "generate", "generate", "reward", "reward"]
    assert Realms.of(config.load(path, ["env.judge.served_by=reward", "algorithm=sft"])).reward == ()


def test_messages_and_realms(start):
    world = start("check")
    assert world.wait() == [0] * SIZE, [log.read_text()[-2000:] for log in world.logs]
    assert "checked" in world.logs[0].read_text()
    assert not list(world.run_dir.glob("attempts/*/failure.json"))


def test_an_error_on_a_rank_ends_the_run_with_its_message(start):
    world = start("fail")
    world.until("on fire", rank=3)
    assert world.processes[0].wait(30) != 0
    assert world.processes[3].wait(30) != 0
    log = world.logs[0].read_text()
    assert "verb 'fail' failed on rank 3 (generate)" in log
    assert "the engine is on fire" in log
    assert "on fire" in world.failure()["message"]


@pytest.mark.parametrize(("late", "realm", "replied"), [(4, "generate", 2), (6, "reward", 5)])
def test_a_late_verb_names_rank_verb_and_phase(start, late, realm, replied):
    world = start(f"hang-{realm}")
    assert world.processes[0].wait(60) == 124
    failure = world.failure()
    assert (failure["rank"], failure["realm"], failure["verb"], failure["phase"]) == (late, realm, "hang", "decode")
    assert "verb 'hang' has not ended after 5 s" in failure["message"]
    assert f"rank {late} ({realm}) on node{late}, in verb 'hang', phase 'decode'" in failure["message"]
    assert f"rank {replied}" not in failure["message"]
    assert all(code != 0 for code in world.wait())  # the others notice that the coordinator is gone


@pytest.mark.parametrize("victim", [0, 6])
def test_a_stopped_rank_is_named_and_nobody_is_left_waiting(start, victim):
    world = start("linger")
    world.until("ready")
    time.sleep(1)  # into the verb
    os.kill(world.processes[victim].pid, signal.SIGSTOP)
    others = [process for rank, process in enumerate(world.processes) if rank != victim]
    assert all(process.wait(60) != 0 for process in others)
    failure = world.failure()
    if victim == 0:
        assert "rank 0 (train), the coordinator, does not answer" in failure["message"]
    else:
        assert failure["rank"] == victim
        assert failure["phase"] == "decode"
        assert re.search(rf"not heard from for 4 s.*rank {victim} \(", failure["message"]), failure


def test_a_rank_that_never_comes_is_named(start):
    world = start("absent")
    assert world.processes[0].wait(60) != 0
    assert "there is no sign of rank 3 (generate)" in world.failure()["message"]


def test_nothing_between_ranks_is_pickled():
    """The ports are open to everyone on the cluster: no pickle, no object collectives, in what we wrote."""
    forbidden = re.compile(r"(^|\.)((cloud)?pickle|\w*(gather|scatter|broadcast|send|recv)_object\w*|torch\.(load|save))$")
    for path in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name | ast.Import | ast.ImportFrom):
                for name in re.split(r"[\s,]+", ast.unparse(node)):
                    assert not forbidden.search(name), f"{path}:{node.lineno}: {name}"
