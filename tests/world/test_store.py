"""Hetstep's store answers like torch's TCPStore, called directly and from torch's C++; and the calls that only it has."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.store import table
from pipeline.store.child_process import Address, start
from pipeline.store.client import RunStore

ROOT = Path(__file__).parents[2]
SHORT = timedelta(seconds=0.2)
VALUES = [
    *(("set", "a", "1"), ("get", "a"), ("add", "a", 4), ("get", "a"), ("add", "n", 2), ("get", "n"), ("add", "n", -5)),
    *(("append", "a", "x"), ("get", "a"), ("append", "new", "x"), ("get", "new"), ("set", "empty", ""), ("get", "empty")),
    *(("compare_set", "c", "", "v"), ("compare_set", "c", "w", "x"), ("compare_set", "c", "v", "x"), ("get", "c")),
    *(("compare_set", "d", "w", "x"), ("check", ["d"]), ("check", ["a", "c"]), ("check", ["a", "d"]), ("check", [])),
    *(("delete_key", "a"), ("delete_key", "a"), ("check", ["a"]), ("wait", ["c"]), ("wait", ["c", "n"], SHORT)),
    *(("multi_set", ["m", "o"], ["1", "2"]), ("multi_get", ["o", "m"]), ("get", "absent"), ("wait", ["absent", "c"], SHORT)),
    *(("multi_get", ["m", "absent"]), ("has_extended_api",)),
]
QUEUES = [
    *(("queue_push", "q", "1"), ("queue_push", "q", b"2"), ("queue_len", "q"), ("queue_pop", "q"), ("queue_pop", "q", False)),
    *(("queue_pop", "q", False), ("queue_pop", "q"), ("queue_len", "q"), ("num_keys",), ("list_keys",)),
]


@pytest.fixture(scope="module")
def server():
    key = os.urandom(32)
    process, address = start("127.0.0.1", key)
    yield process, address, key
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def store(server):
    """Yield both stores, empty."""
    _, address, key = server
    store = RunStore(address, key, 10)
    for each in store.list_keys():
        store.delete_key(each)
    return store


def outcome(store: dist.Store, name: str, *arguments):
    """Return a call's result or its error's name."""
    try:
        answer = getattr(store, name)(*arguments)
        return sorted(answer) if name == "list_keys" else answer
    except Exception as error:
        return type(error)


def torchs_own() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.mark.parametrize("wrapped", [False, True], ids=["directly", "from C++"])
def test_answers_are_those_of_tcpstore(store, wrapped):
    theirs, ours = torchs_own(), store
    if wrapped:
        theirs, ours = dist.PrefixStore("p", theirs), dist.PrefixStore("p", ours)
    for each in (theirs, ours):
        each.set_timeout(SHORT)
    calls = VALUES if wrapped else VALUES + QUEUES
    assert len(calls) >= len(VALUES) > 0
    for call in calls:
        assert outcome(ours, *call) == outcome(theirs, *call), call


def test_a_wait_ends_when_its_key_is_set(store):
    values = {f"k{i}": bytes([i % 251]) * 3000 for i in range(500)}  # several batches
    assert sum(map(len, values.values())) > 4 * table.BATCH
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.extend(store.multi_get(list(values))))
    thread.start()
    other = store.clone()
    for key in reversed(values):
        other.set(key, values[key])
    thread.join(10)
    assert got == list(values.values())


def test_each_value_of_a_queue_goes_to_one_live_waiter(store):
    dead = store.clone()
    waiting = threading.Thread(target=outcome, args=(dead, "queue_pop", "q"))
    waiting.start()
    time.sleep(0.3)
    dead._socket.shutdown(2)  # as if its process were killed
    waiting.join(10)
    got: list[bytes] = []
    takers = [threading.Thread(target=lambda: got.append(store.clone().queue_pop("q"))) for _ in range(5)]
    for taker in takers:
        taker.start()
    for i in range(5):
        store.queue_push("q", str(i))
    for taker in takers:
        taker.join(10)
    assert sorted(got) == [b"0", b"1", b"2", b"3", b"4"]
    assert store.queue_len("q") == 0


def test_a_lost_connection_is_published_unless_its_will_was_cancelled(store):
    lost, left = store.clone(), store.clone()
    lost.set_on_disconnect("lost/1")
    left.set_on_disconnect("lost/2")
    left.set_on_disconnect("")
    for each in (left, lost):
        each._socket.close()
    store.wait(["lost/1"])
    assert store.exchange("beat", b"1", ["lost/1", "lost/2", "beat"]) == [b"", None, b"1"]


def test_a_failing_request_does_not_affect_others(store):
    store.set("word", "abc")
    with pytest.raises(dist.DistStoreError, match="Add: invalid literal"):
        store.add("word", 1)
    with pytest.raises(ValueError, match="takes at most 8388608"):
        store.set("large", bytes(9 << 20))
    for _ in range(2):
        store.append("long", bytes(5 << 20))
    with pytest.raises(dist.DistStoreError, match=r"Get: a message of .* takes at most 8388608"):
        store.get("long")
    assert store.get("word") == b"abc"


PARENT = """
import sys
from pipeline.store.child_process import start
process, address = start("127.0.0.1", bytes(32))
print(address.port, flush=True)
sys.stdin.read()
"""


def test_the_store_ends_with_the_process_that_started_it():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        address = Address("127.0.0.1", int(parent.stdout.readline()))
        store = RunStore(address, bytes(32), 10)
        store.set("a", "1")
        parent.kill()
    with pytest.raises(dist.DistNetworkError, match=r"the store of rank 0 at 127.0.0.1:\d+ is gone"):
        store.wait(["never"])
    with pytest.raises(dist.DistNetworkError):
        store.get("a")
    with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
        RunStore(address, bytes(32), 0.5)


def test_signals_to_the_whole_job_do_not_end_the_store(server, store):
    """Slurm sends them to every process of a step, and rank 0 may still save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        server[0].send_signal(number)
    assert store.add("n", 1) == 1
