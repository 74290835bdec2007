"""World, remote calls and watchdog over seven processes of three realms.

Errors name the rank, the verb and the phase.
"""

import ast
import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import config
from pipeline.job import world
from pipeline.job.world import WorkerGroups
from tests.fork_server import Program
from tests.launch.model import write_recipe
from tests.world.worlds import SIZE

ROOT = Path(__file__).parents[2]
GAVE_UP, WITH_ANOTHER = 124, 123


def test_the_realms_of_a_recipe(tmp_path):
    """The order of ranks is train, generate, reward; only a reward model with its own ranks has the latter."""
    judged = {"judge": {"kind": "reward_model", "model_name": "some/where"}, "math": {"kind": "math"}}
    ranks = {"train": {"nodes": 2}, "generate": {"ranks_per_node": 3}, "reward": {"nodes": 2}, "executor": "local"}
    path = str(write_recipe(tmp_path, env=judged, cluster=ranks))
    assert WorkerGroups.of(config.load(path)) == WorkerGroups((0, 1), (2, 3, 4), ((2,), (3,), (4,)))
    workers = WorkerGroups.of(config.load(path, ["env.judge.served_by=reward"]))
    assert workers == WorkerGroups((0, 1), (2, 3, 4), ((2,), (3,), (4,)), reward=(5, 6))
    assert [workers.name(rank) for rank in (1, 2, 4, 5, 6)] == ["train", "generate", "generate", "reward", "reward"]
    assert WorkerGroups.of(config.load(path, ["env.judge.served_by=reward", "algorithm=sft"])).reward == ()


@pytest.mark.parametrize(
    ("workers", "peers"),
    [
        (WorkerGroups((0, 1), (2, 3), ((2,), (3,))), [[2, 3], [2, 3], [0, 1], [0, 1]]),
        (WorkerGroups((0, 1), (2, 3), ((2,), (3,)), colocated=True), [[]] * 4),
        (WorkerGroups((0, 1), (), (), reward=(2, 3)), [[]] * 4),
    ],
)
def test_paths_of_a_refit_are_opened_before_vllm_takes_memory(workers, peers, monkeypatch):
    """Those of one node too: only ranks that share GPUs map each other's memory."""
    opened, broadcasts = [], []
    monkeypatch.setattr(world.dist, "P2POp", lambda operation, tensor, peer, group: (operation, peer))
    monkeypatch.setattr(world.dist, "batch_isend_irecv", lambda batch: opened.append(batch) or [])
    monkeypatch.setattr(world.dist, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(world.dist, "broadcast", lambda tensor, src, group: broadcasts.append((src, group)))
    for rank in range(4):
        opened.clear()
        one = SimpleNamespace(
            rank=rank, component=workers.name(rank), workers=workers, carrier="cpu", spanning=None, refit="refit"
        )
        one.phase = lambda phase, verb: nullcontext()
        world.connect(one)
        operation = world.dist.isend if rank < 2 else world.dist.irecv
        assert [pair for batch in opened for pair in batch] == [(operation, peer) for peer in peers[rank]]
        opened.clear()
        world.connect(one, broadcasts=True)
        assert not opened and broadcasts.pop() == (0, "refit")
    monkeypatch.setattr(world, "MOST_PATHS", 3)
    assert world._refit_peers(one) == []


def test_a_ranks_log_can_be_read_before_the_rank_runs(tmp_path):
    program = Program(time.sleep, (0,), os.environ, tmp_path / "log")
    assert (tmp_path / "log").read_text() == ""
    assert program.wait(100) == 0


def test_messages_and_realms(start):
    world = start("check")
    assert world.wait() == [0] * SIZE, [log.read_text()[-2000:] for log in world.logs]
    assert "checked" in world.logs[0].read_text()
    assert not list(world.run_dir.glob("attempts/*/failure.json"))


def test_an_error_on_a_rank_ends_the_run_and_only_its_traceback_is_shown(start):
    world = start("fail")
    assert world.wait() == [WITH_ANOTHER] * 3 + [1] + [WITH_ANOTHER] * 3
    failure = world.failure()
    assert (failure["rank"], failure["realm"], failure["host"], failure["verb"]) == (3, "generate", "node3", "fail")
    assert failure["message"] == "rank 3 (generate): ValueError: the engine is on fire"
    assert 'raise ValueError("the engine is on fire")' in failure["traceback"]
    for rank in {*range(SIZE)} - {3}:
        assert re.fullmatch(rf"rank {rank} .* ends because of (the failure of rank 3 .*|an earlier failure)\n", world.log(rank))


@pytest.mark.parametrize("victim", [3, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_is_named_without_those_whose_connections_it_broke(start, victim):
    """All ranks of its realm are in a collective with it."""
    world = start("reduce")
    world.until("ready")
    time.sleep(0.5)  # until it is in the collective
    world.processes[victim].kill()
    statuses = world.wait(120)
    failure = world.failure()
    assert failure["rank"] == victim, failure
    assert failure["host"] == f"node{victim}"
    if victim:
        assert re.search(r"died without an error .*: rank 3 \(generate\) on node3, in verb 'reduce'", failure["message"])
        assert statuses == [GAVE_UP] + [WITH_ANOTHER] * 2 + [-signal.SIGKILL] + [WITH_ANOTHER] * 3
    else:
        assert "rank 0 (train), the coordinator, on node0 is gone, and the store with it" in failure["message"]
        assert statuses.count(GAVE_UP) == 1 and statuses.count(WITH_ANOTHER) == SIZE - 2
    assert not any("Traceback" in world.log(rank) for rank in range(SIZE))


@pytest.mark.long
def test_the_end_of_the_stores_process_ends_all_ranks_with_a_clear_message(start):
    world = start("linger")
    world.until("ready")
    os.kill(int(world.log(0).split()[world.log(0).split().index("store") + 1]), signal.SIGKILL)
    assert world.wait(120) == [GAVE_UP] + [WITH_ANOTHER] * (SIZE - 1)
    assert "the store's process beside rank 0 (train) has ended (status -9)" in world.failure()["message"]


@pytest.mark.parametrize(
    ("late", "realm", "replied"), [(4, "generate", 2), pytest.param(6, "reward", 5, marks=pytest.mark.long)]
)
def test_a_late_verb_names_rank_verb_and_phase(start, late, realm, replied):
    world = start(f"hang-{realm}")
    assert world.processes[0].wait(120) == GAVE_UP
    failure = world.failure()
    assert (failure["rank"], failure["realm"], failure["verb"], failure["phase"]) == (late, realm, "hang", "decode")
    assert "verb 'hang' has not ended after 5 s" in failure["message"]
    assert f"rank {late} ({realm}) on node{late}, in verb 'hang', phase 'decode'" in failure["message"]
    assert f"rank {replied}" not in failure["message"]
    assert all(code != 0 for code in world.wait())  # the others notice that the coordinator has ended


@pytest.mark.parametrize("victim", [0, pytest.param(6, marks=pytest.mark.long)])
def test_a_stopped_rank_is_named_and_no_rank_is_left_waiting(start, victim):
    world = start("linger")
    world.until("ready")
    time.sleep(1)  # until it is in the verb
    os.kill(world.processes[victim].pid, signal.SIGSTOP)
    others = [process for rank, process in enumerate(world.processes) if rank != victim]
    assert all(process.wait(120) != 0 for process in others)
    failure = world.failure()
    if victim == 0:
        assert "rank 0 (train), the coordinator, has not answered" in failure["message"]
    else:
        assert failure["rank"] == victim
        assert failure["phase"] == "decode"
        assert re.search(rf"not heard from for 4 s.*rank {victim} \(", failure["message"]), failure


@pytest.mark.full
def test_ranks_may_be_silent_for_longer_while_they_load(start):
    """Two of them hold the GIL for 7 s, so none of their threads runs, and neither counts as dead."""
    world = start("loading")
    assert world.wait() == [0] * SIZE, [log.read_text()[-2000:] for log in world.logs]


@pytest.mark.full
def test_a_rank_that_never_joins_is_named(start):
    world = start("absent")
    assert world.processes[0].wait(120) != 0
    assert "no message from rank 3 (generate)" in world.failure()["message"]


def test_nothing_between_ranks_is_pickled():
    """The ports are reachable from the whole cluster, so our code uses neither pickle nor object collectives."""
    forbidden = re.compile(r"(^|\.)((cloud)?pickle|\w*(gather|scatter|broadcast|send|recv)_object\w*|torch\.(load|save))$")
    paths = list((ROOT / "pipeline").rglob("*.py"))
    assert len(paths) > 200
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name | ast.Import | ast.ImportFrom):
                for name in re.split(r"[\s,]+", ast.unparse(node)):
                    assert not forbidden.search(name), f"{path}:{node.lineno}: {name}"
