"""Check the processes of environments that an environment rank starts for an engine's rank."""

import functools
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from pipeline.roles.environment_ranks import serving_ranks
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.judges.pools import JudgePools
from pipeline.rollout.judges.remote_process import LOST, MOST_UNKNOWN, ProcessServer, RemoteProcess
from pipeline.sandbox import processes
from pipeline.store.auth import Refused
from tests.launch.waiting import alive
from tests.rollout import judge_scenarios as scenarios
from tests.rollout.engine import prompts

KEY = bytes(range(32))


@pytest.fixture
def server():
    server = ProcessServer("127.0.0.1", KEY)
    yield server
    server.close()


@pytest.fixture
def pool(server, checkpoint):
    """Return a function that makes a pool on the server, with its environments loaded."""
    pools = []

    def make(kind: str, **kwargs) -> JudgePool:
        chosen = scenarios.settings(checkpoint.folder, f"tests.rollout.judged.{kind}", **kwargs)
        pools.append(JudgePool(chosen, threading.Event(), functools.partial(RemoteProcess.start, server.address, KEY, 60)))
        pools[-1].wait_until_loaded(120)
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def started_by(before: set[int]) -> list[int]:
    return sorted({*processes.children(os.getpid())} - before)


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
    return True


def test_episodes_keep_their_process_among_several(pool):
    """Each of three turns of an episode is judged where the first was; both pools judge some of the episodes.

    A task of 24 MB is more than one sealed message may hold.
    """
    judges = JudgePools([pool("Sums"), pool("Sums")])
    names, large = [f"episode {i}" for i in range(12)], prompts(1)[0]
    large.task["text"] = "x" * (24 << 20)
    begun = [scenarios.said(name, prompts(1)[0] if number else large, last=False) for number, name in enumerate(names)]
    turns = [scenarios.answers(judges, *begun)]
    turns += [scenarios.answers(judges, *(scenarios.said(name, None, last) for name in names)) for last in (False, True)]
    assert [turn[name].reward for turn in turns for name in names] == [1.0] * 36
    ids = [{turn[name].metrics["pid"] for turn in turns} for name in names]
    assert all(len(own) == 1 for own in ids)
    shares = [sum(judges._of(name) is one for name in names) for one in judges._pools]
    assert min(shares) > 0 and judges.seconds_left() is None


def test_close_closes_the_environments(pool, tmp_path):
    before = {*processes.children(os.getpid())}
    judges = pool("Closing", path=str(tmp_path / "notes"))
    own = started_by(before)
    assert len(own) == 1
    judges.close()
    assert (tmp_path / "notes").read_text().split() == ["closed"] and gone(own)


def test_a_process_that_dies_is_replaced(pool, caplog):
    before = {*processes.children(os.getpid())}
    judges = pool("Sums")
    first = prompts(1)[0]
    (own,) = started_by(before)
    assert scenarios.answers(judges, scenarios.said("0", first, last=False))["0"].reward == 1.0
    os.kill(own, signal.SIGKILL)
    found = scenarios.answers(judges, scenarios.said("0", None), scenarios.said("1", first))
    assert found["0"].why == scenarios.LOST_WITH_PROCESS and found["1"].reward == 1.0
    assert f"was killed by SIGKILL on {os.uname().nodename} while it judged" in caplog.text


def test_a_lost_connection_ends_the_process(pool):
    before = {*processes.children(os.getpid())}
    judges = pool("Sums")
    own = started_by(before)
    process = scenarios.process_of(judges)
    process.connection.shutdown(socket.SHUT_RDWR)
    assert gone(own)
    process.wait(30)
    assert process.has_ended() and process.end() == LOST


def test_altered_bytes_end_the_process(pool, caplog):
    """A byte that someone adds to the connection is no message of the engine's rank."""
    before = {*processes.children(os.getpid())}
    judges = pool("Sums")
    own = started_by(before)
    process = scenarios.process_of(judges)
    assert isinstance(process, RemoteProcess)
    process._stream._connection.sendall(b"\0" * 64)
    assert gone(own)
    assert scenarios.answers(judges, scenarios.said("0", prompts(1)[0]))["0"].reward == 1.0  # of its successor


def test_strangers_get_no_process(server):
    before = {*processes.children(os.getpid())}
    silent = [socket.create_connection(server.address) for _ in range(MOST_UNKNOWN + 1)]
    with pytest.raises(Refused):
        RemoteProcess.start(server.address, bytes(32), 5.0)
    assert started_by(before) == [] and len(server._unknown) <= MOST_UNKNOWN
    for connection in silent:
        connection.close()


def test_a_connection_that_cannot_be_accepted_ends_no_server(server, pool, caplog):
    """The first connection finds no free descriptor."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, usual[1]))
    try:
        refused = socket.socket()
        refused.connect_ex(server.address)
        time.sleep(0.3)
    except OSError:
        refused = None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert scenarios.answers(pool("Sums"), scenarios.said("0", prompts(1)[0]))["0"].reward == 1.0
    if refused:
        refused.close()


def test_a_connection_without_a_thread_is_closed(server, monkeypatch, caplog):
    """The first connection finds no free thread; the server lives on."""
    start, failed = threading.Thread.start, []

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == "environments" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with socket.create_connection(server.address, timeout=30) as first:
        assert first.recv(1) == b""
    assert not server._unknown and "is not accepted: can't start new thread" in caplog.text
    with socket.create_connection(server.address, timeout=30) as second:
        assert len(second.recv(1)) == 1  # of the challenge


def test_a_process_that_cannot_be_started_is_explained(server, monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    process = RemoteProcess.start(server.address, KEY, 60)
    process.begin(scenarios.settings(Path(), "exact_match"), threading.Event())
    process.wait(30)
    assert process.has_ended() and f"could not be started on {os.uname().nodename}: " in process.end()


def test_every_engine_has_a_rank_and_every_rank_an_engine():
    assert [serving_ranks((8, 9, 10, 11, 12), engine, 2) for engine in range(2)] == [(8, 10, 12), (9, 11)]
    assert [serving_ranks((8, 9), engine, 7) for engine in range(7)] == [(8,), (9,), (8,), (9,), (8,), (9,), (8,)]
