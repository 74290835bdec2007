"""A relay on each node: seven ranks on three nodes, all of which but rank 0's have a relay.

Answers and errors are the same as without relays.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
import torch.distributed as dist

from pipeline.config import TimeoutsConfig
from pipeline.job.watchdog import Watchdog
from pipeline.job.world import RankInfo, World, _find_relay
from pipeline.store import auth, messaging, relay, server, table
from pipeline.store.child_process import Address, launch, start
from pipeline.store.client import RunStore
from tests.world.ranks import WORKERS
from tests.world.worlds import SIZE

GAVE_UP, WITH_ANOTHER = 124, 123
PER_NODE = 3


def relays(world) -> dict[int, int]:
    """Return {process: the rank that has started it}."""
    ranks = {process.pid: rank for rank, process in enumerate(world.processes)}
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines()
    found = (line.split() for line in listed if "pipeline.store.relay" in line)
    return {int(pid): ranks[int(parent)] for pid, parent, *_ in found if int(parent) in ranks}


@pytest.mark.parametrize("by", ["SPARSE", pytest.param("TORCH_GLOO_LAZY_INIT", marks=pytest.mark.full)])
def test_relays_forward_messages_until_the_last_rank_of_their_node_has_ended(start, monkeypatch, by):
    """Ranks whose gloo connections are lazy, as in a large world, forward bodies from rank to rank too."""
    monkeypatch.setenv(by, "1")
    monkeypatch.setenv("SLOW_END", "1")  # of the ranks that have not started a relay
    world = start("check", PER_NODE)
    assert world.wait() == [0] * SIZE, [log.read_text()[-2000:] for log in world.logs]
    assert "checked" in world.log(0)
    assert not list(world.run_dir.glob("attempts/*/failure.json"))


def test_an_error_on_one_rank_comes_at_once_with_its_traceback(start):
    world = start("fail", PER_NODE)
    statuses = world.wait()
    assert statuses[3] == 1 and all(statuses), statuses
    failure = world.failure()
    assert (failure["rank"], failure["host"], failure["verb"]) == (3, "node1", "fail")
    assert 'raise ValueError("the engine is on fire")' in failure["traceback"]


@pytest.mark.parametrize("victim", [3, pytest.param(4, marks=pytest.mark.full)])
def test_a_killed_rank_is_named_even_if_its_relay_ends_with_it(start, victim):
    world = start("linger", PER_NODE)
    world.until("ready")
    time.sleep(1)  # until rank 0 has heartbeats of all
    first = set(relays(world).values())
    assert len(first) == 2 and first & {3, 4, 5} and 6 in first
    victim = next(iter(first - {6})) if victim == 3 else next(rank for rank in (3, 4, 5) if rank not in first)
    world.processes[victim].kill()
    statuses = world.wait(120)
    failure = world.failure()
    assert failure["rank"] == victim and failure["host"] == "node1", failure
    assert re.search(rf"died without an error message .*: rank {victim} ", failure["message"])
    assert all(statuses)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["rank 0", "the store's process"])
def test_the_stores_end_is_not_blamed_on_a_rank_that_started_a_relay(start, victim):
    """Each relay ends with the store, before any rank has reported why."""
    world = start("linger", PER_NODE)
    world.until("ready")
    time.sleep(1)  # until all have rank 0's heartbeat
    if victim == "rank 0":
        world.processes[0].kill()
    else:
        os.kill(int(re.search(r"store (\d+)", world.log(0)).group(1)), signal.SIGKILL)
    assert all(world.wait(120))
    failure = world.failure()
    assert (failure["rank"], failure["host"]) == (0, "node0"), failure
    assert (victim if victim != "rank 0" else "rank 0 (train), the coordinator, on node0 is gone") in failure["message"]


@pytest.mark.full
def test_a_relays_end_ends_the_run_and_names_the_rank_that_started_it(start):
    world = start("linger", PER_NODE)
    world.until("ready")
    pid, rank = next((pid, rank) for pid, rank in relays(world).items() if rank != 6)
    os.kill(pid, signal.SIGKILL)
    assert all(world.wait(120))
    assert world.failure()["rank"] == rank, world.failure()


@pytest.mark.full
def test_a_stopped_rank_behind_a_relay_is_named(start):
    world = start("linger", PER_NODE)
    world.until("ready")
    time.sleep(1)
    victim = next(rank for rank in (3, 4, 5) if rank not in relays(world).values())
    os.kill(world.processes[victim].pid, signal.SIGSTOP)
    assert all(process.wait(120) != 0 for rank, process in enumerate(world.processes) if rank != victim)
    assert re.search(rf"not heard from for 4 s.*rank {victim} \(", world.failure()["message"]), world.failure()


# ---- one relay ----------------------------------------------------------------------------------------------------------


def end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


class Doorkeeper:
    """A store's address that closes the first connections at once and accepts a later one."""

    def __init__(self, key: bytes, closes: int):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self.listener.getsockname())
        self.seen = 0
        threading.Thread(target=self._serve, args=(key, closes), daemon=True).start()

    def _serve(self, key: bytes, closes: int) -> None:
        with contextlib.suppress(OSError):
            while self.seen <= closes:
                connection, _ = self.listener.accept()
                self.seen += 1
                if self.seen <= closes:
                    connection.close()
            challenge = auth.challenge()
            connection.sendall(challenge)
            own, _ = auth.accept(key, challenge, auth.receive(connection, auth.ANSWER))
            connection.sendall(own)
            while connection.recv(1000):
                pass


def test_a_relay_whose_connection_is_closed_connects_again():
    door = Doorkeeper(key := os.urandom(32), 2)
    process, _ = relay.start(door.address, key, 3, 1.0, 30.0)
    assert door.seen == 3 and process.poll() is None
    end(process)


def test_a_relay_that_cannot_reach_the_store_reports_why(capfd):
    door = Doorkeeper(key := os.urandom(32), 10**6)
    with pytest.raises(RuntimeError, match=r"pipeline\.store\.relay has ended with status 1 before it listened"):
        relay.start(door.address, key, 3, 1.0, 0.5)
    told = r" ERROR \S+ the relay of rank 3 gives up: the store of rank 0: 127.0.0.1:\d+ cannot be reached: .*(closed|reset)"
    assert re.search(told, capfd.readouterr().err) and door.seen > 1
    door.listener.close()


def test_waiting_for_a_process_that_never_listens_times_out():
    with pytest.raises(TimeoutError, match=r"the process of json\.tool does not listen after 0\.5 s"):
        launch("json.tool", "127.0.0.1", {}, 0.5)  # reads all of its input before it prints


def test_errors_behind_a_relay_name_it(tmp_path, monkeypatch):
    key = os.urandom(32)
    process, address = start("127.0.0.1", key)
    store = RunStore(address, key, 10)
    relaying, store.relay = relay.start(address, key, 3, 1.0, 30.0)
    world = World(RankInfo(4, 7, 4, "node1", "127.0.0.1", tmp_path), WORKERS, store)
    watchdog, failures = Watchdog(world, TimeoutsConfig(silence=1)), []
    monkeypatch.setattr(watchdog, "_end", failures.append)
    watchdog._judge_silence({}, time.monotonic() + 60)
    assert failures[0].message.startswith("the relay of node1 has not answered for 10 s"), failures
    relaying.kill()
    with pytest.raises(dist.DistNetworkError, match=r"the relay of node1 at 127\.0\.0\.1:\d+ is gone"):
        watchdog._store.exchange("beat/4", b"", [])
    end(relaying)
    end(process)


def test_requests_behind_a_refused_one_are_not_executed():
    key = os.urandom(32)
    process, address = start("127.0.0.1", key)
    relaying, near = relay.start(address, key, 3, 0.1, 30.0)
    connection, channel = auth.connect(near, key, time.monotonic() + 10)
    requests = [messaging.Send(1, [([3], b"verb")]), table.Exchange({"behind": b"1"}, ["behind"])]
    connection.sendall(b"".join(channel.seal(server._encode(request)) for request in requests))
    assert connection.recv(1000) == auth.REFUSED
    assert RunStore(near, key, 10).exchange("beat", b"1", ["beat"]) == [None]
    time.sleep(0.5)  # after the relay has exchanged heartbeats
    assert RunStore(address, key, 10).check(["beat"]) and not RunStore(address, key, 10).check(["behind"])
    end(relaying)
    end(process)


def test_a_relay_that_does_not_start_is_named_with_its_rank(tmp_path):
    key = os.urandom(32)
    process, address = start("127.0.0.1", key)
    store = RunStore(address, key, 0.5)
    store.set("relay/node1/by", "3")  # the rank, which then hangs
    info = RankInfo(4, 7, 4, "node1", "127.0.0.1", tmp_path)
    with pytest.raises(TimeoutError, match=r"verb 'join': rank 3 has not started node1's relay within 0\.5 s"):
        _find_relay(store, info, address, key, 60.0)
    store.set("relay/node1", "")
    _find_relay(store, info, address, key, 60.0)
    assert store.relay is None  # the node of rank 0
    end(process)
