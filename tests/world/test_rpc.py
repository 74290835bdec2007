"""Streaming replies and roles that work between verbs: rank 0 and another rank are threads, over the real store."""

import hashlib
import os
import threading
import time
from dataclasses import dataclass

import msgspec
import pytest
import torch.distributed as dist

from pipeline.files.encoding import encode
from pipeline.job.world import RankInfo, WorkerGroups, World
from pipeline.rpc import RpcClient, RpcError, RpcGroup, StreamingReply, calls, serve, serving, stop, verb
from pipeline.rpc.messages import INLINE, Envelope, as_tensor, route
from pipeline.store import messaging
from pipeline.store.child_process import start
from pipeline.store.client import RunStore

WORKERS = WorkerGroups(train=(0,), generate=(1,), engines=((1,),))


@dataclass
class Timeouts:
    short: float = 0.3
    long: float = 60.0


class Counter:
    """Counts between verbs up to a limit, sends one part for each number, and notes what it did."""

    def __init__(self):
        self.wakeup = threading.Event()
        self.done: list[str] = []
        self.open: list[tuple[StreamingReply[int], int]] = []
        self.go = threading.Semaphore(0)  # one for each number
        self.closed = False

    @verb("long")
    def count(self, end: int) -> StreamingReply[int]:
        later: StreamingReply[int] = StreamingReply()
        later.put(0)
        self.open.append((later, end))
        self.number = 0
        return later

    @verb("short")
    def nothing(self) -> StreamingReply[int]:
        return StreamingReply()

    @verb("short")
    def silent(self) -> StreamingReply[int]:
        return StreamingReply()

    @verb("long")
    def at_once(self) -> StreamingReply[str]:
        later: StreamingReply[str] = StreamingReply()
        later.put("a")
        later.put("b")
        later.end()
        return later

    @verb("long")
    def ask(self, text: str) -> str:
        self.done.append(text)
        return text.upper()

    @verb("short")
    def body(self) -> str:
        return "x" * INLINE

    @verb("short")
    def bodies(self) -> StreamingReply[str]:
        later: StreamingReply[str] = StreamingReply()
        later.put("x" * INLINE)
        later.end()
        return later

    @verb("short")
    def slow(self) -> None:
        time.sleep(0.6)

    def work(self, verb_waits):
        while self.open and not verb_waits():
            if not self.go.acquire(timeout=0.01):
                continue
            later, end = self.open[0]
            self.number += 1
            if self.number > 100:
                raise ValueError("it cannot count so far")
            self.done.append(str(self.number))
            later.put(self.number)
            if self.number == end:
                later.end()
                self.open.pop(0)

    def close(self):
        self.closed = True


@pytest.fixture
def job(tmp_path):
    """Yield (RpcGroup, the other rank's role, RpcClient, the errors it raised)."""
    key, raised = os.urandom(32), []
    process, address = start("127.0.0.1", key)
    worlds = [
        World(RankInfo(rank, 2, rank, "here", "127.0.0.1", tmp_path), WORKERS, RunStore(address, key, 60)) for rank in (0, 1)
    ]
    role, client = Counter(), RpcClient(worlds[0])

    def other():
        try:
            serve(worlds[1], role)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    yield RpcGroup(client, worlds[0], (1,), Counter, Timeouts()), role, client, raised
    stop(worlds[0])
    thread.join(60)
    assert not thread.is_alive()
    assert raised or role.closed
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


def test_parts_arrive_as_they_are_sent_and_other_verbs_run_between_them(job):
    remote, role, _, _ = job
    count = remote.call(Counter.count, 3)
    assert remote.receive_replies(block=True)
    assert count.take() == [(1, [0])] and count.take() == [] and not count.done
    role.go.release()
    remote.receive_replies(block=True)
    assert count.take() == [(1, [1])]
    assert remote.call(Counter.ask, "between").result() == ["BETWEEN"]
    role.go.release(2)
    assert count.result() == [[2, 3]]  # the parts that were not taken
    assert [number for _, part in count.take() for number in part] == [2, 3]
    assert count.done and role.done == ["1", "between", "2", "3"]
    assert not remote.receive_replies(block=False)


def test_parts_arrive_before_their_reply(job):
    remote, role, _, _ = job
    count = remote.call(Counter.count, 2)
    role.go.release()
    while "1" not in role.done:
        time.sleep(0.01)
    asked = remote.call(Counter.ask, "now")
    while not asked.done:
        remote.receive_replies(block=True)
    assert [number for _, part in count.take() for number in part] == [0, 1]
    role.go.release()
    count.result()


def test_a_reply_may_come_at_once_and_a_finished_future_is_dropped(job):
    remote, _, client, _ = job
    futures = [remote.call(Counter.at_once), remote.call(Counter.ask, "x")]
    assert [future.result() for future in futures] == [[["a", "b"]], ["X"]]
    assert not client._futures


def test_verbs_of_other_roles_and_other_methods_are_refused(job):
    remote, _, client, _ = job

    class Other:
        @verb("long")
        def ask(self, text: str) -> str: ...

    with pytest.raises(TypeError, match=r"got verb .*Other\.ask; expected a verb of Counter"):
        remote.call(Other.ask, "x")
    with pytest.raises(AttributeError, match=r"Counter\.close is not a verb"):
        remote.call(Counter.close)
    assert not client._futures


def test_an_error_between_verbs_is_reported_to_rank_0(job):
    remote, role, _, raised = job
    role.go.release(101)
    with pytest.raises(RpcError, match=r"(?s)failed on rank 1 .*ValueError: it cannot count so far"):
        remote.call(Counter.count, 1000).result()
    role.open.clear()
    while not raised:
        time.sleep(0.01)
    assert isinstance(raised[0], ValueError)


def test_a_streaming_reply_is_overdue_only_while_rank_0_waits(job):
    """Its parts may be queued while rank 0 is busy."""
    remote, _, client, _ = job
    remote.call(Counter.silent)  # rank 0 does not wait for this one
    nothing = remote.call(Counter.nothing)
    time.sleep(2 * Timeouts.short)
    assert client.overdue() is None

    def wait():
        with pytest.raises(RpcError):
            nothing.result()

    waiting = threading.Thread(target=wait)
    waiting.start()
    deadline = time.monotonic() + 30
    while not (late := client.overdue()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (late.verb, late.timeout_s, late.missing) == ("nothing", Timeouts.short, [1])
    client._asking.send(messaging.Answers([messaging.VerbReply(messaging.NO_CALL, [1], "nothing", b"", error="enough")]))
    waiting.join(30)


def test_a_plain_call_is_overdue_even_if_rank_0_does_not_wait(job):
    remote, _, client, _ = job
    slow = remote.call(Counter.slow)
    time.sleep(1.5 * Timeouts.short)
    assert client.overdue().verb == "slow"
    slow.result()
    assert client.overdue() is None


def test_a_plain_call_is_overdue_after_the_store_was_stuck(job):
    remote, _, client, _ = job
    slow = remote.call(Counter.slow)
    client._asking._socket.close()  # as if a reply were too late
    time.sleep(1.2 * Timeouts.short)
    assert client.overdue() is None
    assert client.overdue().missing == [1]
    slow.result()


@pytest.mark.parametrize("name", ["body", "bodies"])
def test_a_missing_body_makes_its_call_overdue(job, monkeypatch, name):
    """The store has seen the answer and waits for no rank."""
    remote, _, client, _ = job
    world, asked, released = client._world, threading.Event(), threading.Event()
    monkeypatch.setattr(serving, "send_body", lambda *_: None)

    def receive_body(_, size, *__):
        asked.set()
        assert released.wait(60)
        return as_tensor(encode(["x" * INLINE] if name == "bodies" else "x" * INLINE))

    monkeypatch.setattr(calls, "receive_body", receive_body)
    future = remote.call(getattr(Counter, name))
    waiting = threading.Thread(target=future.result)
    waiting.start()
    assert asked.wait(60)
    begun = time.monotonic()
    assert (world.activity.verb, world.activity.phase) == (name, "receive the body of rank 1 (generate)")
    while not (late := client.overdue()):
        assert time.monotonic() - begun < 30
        time.sleep(0.01)
    assert (late.verb, late.missing) == (name, [1])
    assert time.monotonic() - begun > 0.9 * Timeouts.short  # however late rank 0 begins to receive it
    released.set()
    waiting.join(30)
    assert client.overdue() is None


def test_an_argument_for_several_ranks_is_encoded_and_sent_once(tmp_path, monkeypatch):
    key, sent, encoded = os.urandom(32), [], []
    process, address = start("127.0.0.1", key)
    workers = WorkerGroups(train=tuple(range(7)), generate=(), engines=())
    world = World(RankInfo(0, 7, 0, "here", "127.0.0.1", tmp_path), workers, RunStore(address, key, 60))
    monkeypatch.setattr(calls, "send_body", lambda world, body, call, to: sent.append((len(body), to)))
    encode = calls.encode
    monkeypatch.setattr(calls, "encode", lambda message: encoded.append(message) or encode(message))
    remote = RpcGroup(RpcClient(world), world, workers.train, Counter, Timeouts(), Counter())
    one, other = "1" * (INLINE + 1), "2" * (INLINE + 1)
    future = remote.scatter(Counter.ask, [one, one, other, one, other, one, one])
    assert future.missing == [1, 2, 3, 4, 5, 6]
    assert [to for _, to in sent] == [1, 2] and encoded == [one, other]
    inbox = world.store.clone()
    inbox.send(messaging.Subscribe([5]))
    (message,) = inbox.next_messages()
    envelope = msgspec.msgpack.decode(message, type=Envelope)
    assert envelope.ranks == (1, 3, 5, 6) and envelope.follows == sent[0][0] and not envelope.body
    assert envelope.digest == hashlib.sha256(encode(one)).digest()
    process.kill()
    process.wait(10)
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("ranks", [[4], [1, 2, 3, 5, 8, 13, 21], list(range(3, 40))])
def test_a_body_reaches_every_rank_once_and_no_rank_sends_it_more_than_twice(ranks):
    taken, waiting = [], [(0, ranks[0])]
    while waiting:
        sender, rank = waiting.pop()
        source, onward = route(ranks, rank)
        assert source == sender and len(onward) <= 2
        taken.append(rank)
        waiting += [(rank, other) for other in onward]
    assert sorted(taken) == ranks


def test_a_rank_without_a_store_ends(tmp_path):
    """The thread that fetches verbs passes its error on."""
    key = os.urandom(32)
    process, address = start("127.0.0.1", key)
    world = World(RankInfo(1, 2, 1, "here", "127.0.0.1", tmp_path), WORKERS, RunStore(address, key, 60))
    timer = threading.Timer(0.3, process.kill)
    timer.start()
    with pytest.raises(dist.DistError, match="is gone"):
        serve(world, object())
    process.wait(10)
    process.stdin.close()
    process.stdout.close()
