"""Calls to many ranks: the store's book of calls and a relay's, driven by hand."""

import pytest

from pipeline.store import messaging, relay
from pipeline.store.messaging import NOTHING, Answers, Collect, PendingCalls, Router, Send, Subscribe, Unanswered, VerbReply
from pipeline.store.table import Missing, OnDisconnect


class Connection:
    def __init__(self):
        self.got = []

    def push(self, value):
        self.got += value


def answer(call, rank, body=b"\xc0", **fields):
    return VerbReply(call, [rank], "verb", body, account=(1.0, 2.0), **fields)


def begin(call, ranks, **fields):
    calls = PendingCalls()
    calls.begin(Send(call, [(list(ranks), b"")], **fields))
    return calls


# ---- down -------------------------------------------------------------------------------------------------------------


def test_each_connection_gets_a_message_once_and_late_ranks_get_stored_messages():
    post, one, other, late = Router(), Connection(), Connection(), Connection()
    post.subscribe(one, [1, 2])
    post.subscribe(other, [3])
    post.send(7, [([1, 2, 3, 4], b"all"), ([2], b"more")])
    assert one.got == [(7, [1, 2], b"all"), (7, [2], b"more")] and other.got == [(7, [3], b"all")]
    post.subscribe(late, [4])
    assert late.got == [(7, [4], b"all")]
    post.leave(one)
    post.send(8, [([1, 3], b"x")])
    assert one.got[-1][0] == 7 and other.got[-1] == (8, [3], b"x")


# ---- up ---------------------------------------------------------------------------------------------------------------


def test_equal_answers_are_merged_when_the_last_rank_has_answered():
    calls = begin(0, range(1, 5))
    for rank in (3, 1, 4):
        calls.accept(answer(0, rank, b"same" if rank < 4 else b"other"))
        assert not calls.ready()
    assert calls.apply(Unanswered(0)) == [2]
    calls.accept(answer(0, 2, b"same"))
    same, other = calls.apply(Collect(1.0))
    assert (sorted(same.ranks), same.body, same.account) == ([1, 2, 3], b"same", (3.0, 6.0))
    assert (other.ranks, other.body) == ([4], b"other")


def test_a_call_sent_in_pieces_ends_with_its_last_piece():
    calls = begin(0, [1], last=False)
    calls.accept(answer(0, 1))
    assert not calls.ready()
    calls.begin(Send(0, [([2], b"")]))
    assert not calls.ready()
    calls.accept(answer(0, 2))
    assert [taken.ranks for taken in calls.apply(Collect(1.0))] == [[1, 2]]


def test_an_error_of_one_rank_is_forwarded_at_once():
    calls = begin(0, range(1, 1000))
    calls.accept(answer(0, 1))
    calls.accept(answer(0, 500, error="Traceback"))
    assert [(taken.ranks, taken.error) for taken in calls.apply(Collect(1.0))] == [([500], "Traceback")]


def test_parts_are_forwarded_at_once_and_an_empty_last_part_sends_nothing():
    calls = begin(0, [1, 2], in_parts=True)
    calls.accept(answer(0, 2, NOTHING))  # follows the leader and ends at once
    assert not calls.ready()
    calls.accept(answer(0, 1, b"part", more=True))
    calls.accept(answer(0, 1, b"part", more=True))
    assert [taken.body for taken in calls.apply(Collect(1.0))] == [b"part", b"part"]
    calls.accept(answer(0, 1, b"last"))
    last, quiet = calls.apply(Collect(1.0))
    assert (last.ranks, last.body, last.more) == ([1], b"last", False)
    assert (quiet.ranks, quiet.body, quiet.more, quiet.account) == ([2], NOTHING, False, (1.0, 2.0))


def test_the_answer_that_ends_a_call_is_the_last():
    """Rank 0 forgets a call when the last rank has ended its answer."""
    calls = begin(0, [1], in_parts=True)
    calls.accept(answer(0, 1, NOTHING, more=True))
    calls.accept(answer(0, 1, b"last"))
    assert [(taken.ranks, taken.more) for taken in calls.apply(Collect(1.0))] == [([1], True), ([1], False)]


def test_finished_calls_leave_nothing_behind():
    calls, post, connection = PendingCalls(), Router(), Connection()
    post.subscribe(connection, range(1, 9))
    for call in range(300):
        send = Send(call, [(list(range(1, 9)), b"")], in_parts=call % 2 == 1)
        calls.begin(send)
        post.send(call, send.parts)
        for rank in range(1, 9):
            calls.accept(answer(call, rank, NOTHING))
        assert len(calls.apply(Collect(1.0))) == 1
    assert not calls._open and not calls._ready and not post._undelivered
    with pytest.raises(Missing):
        calls.apply(Collect(1.0))
    assert calls.apply(Collect(0.0)) == []
    calls.accept(answer(3, 1))  # of a call that is over
    assert not calls.ready() and not calls._open


def test_answers_beyond_a_messages_size_come_in_batches():
    calls = PendingCalls()
    for rank in range(1, 41):
        calls.begin(Send(rank, [([rank], b"")]))
        calls.accept(answer(rank, rank, bytes([rank]) * (messaging.BATCH // 8)))
    taken = []
    while calls.ready():
        batch = calls.apply(Collect(1.0))
        assert sum(len(each.body) for each in batch) <= 2 * messaging.BATCH
        taken += [each.ranks[0] for each in batch]
    assert taken == list(range(1, 41))


@pytest.mark.parametrize(("sizes", "cut"), [([], []), ([0.4, 0.4, 0.4, 0.1], [3, 1]), ([3, 0.1, 3], [1, 2]), ([0.5, 0.5], [2])])
def test_each_batch_but_the_last_ends_with_the_item_that_fills_it(sizes, cut):
    items = [int(size * messaging.BATCH) for size in sizes]
    found = list(messaging.batches(items, int))
    assert [len(batch) for batch in found] == cut and [item for batch in found for item in batch] == items


# ---- a relay ----------------------------------------------------------------------------------------------------------


class Upstream:
    def __init__(self):
        self.sent = []

    def send(self, request):
        self.sent.append(request)

    @property
    def answers(self):
        return [(each.ranks, each.body) for request in self.sent if isinstance(request, Answers) for each in request.answers]


@pytest.fixture
def node(monkeypatch):
    """Return (relay, its connection to the store, the timers that it has started)."""
    timers = []

    class Timer:
        def __init__(self, _, work):
            self.work = work
            timers.append(self)

        def cancel(self):
            timers.remove(self)

    class Loop:
        call_later = Timer

    monkeypatch.setattr(relay.asyncio, "get_running_loop", Loop)
    a_node, upstream = relay.Relay(b"", 1), Upstream()
    a_node.connect(upstream)
    a_node.receive(Connection(), Subscribe([1, 2, 3]))
    a_node.deliver([(0, [1, 2, 3], b"verb")])
    return a_node, upstream, timers


def test_a_relay_merges_the_answers_of_all_its_ranks(node):
    a_node, upstream, timers = node
    for rank in (1, 2):
        a_node.receive(None, Answers([answer(0, rank)]))
        assert not upstream.answers and len(timers) == 1
    a_node.receive(None, Answers([answer(0, 3)]))
    assert upstream.answers == [([1, 2, 3], b"\xc0")] and not timers
    assert not a_node._waiting_replies and not a_node._due


def test_a_relay_waits_briefly_for_a_late_rank_so_that_the_others_are_not_named_too(node):
    a_node, upstream, timers = node
    for rank in (1, 3):
        a_node.receive(None, Answers([answer(0, rank)]))
    timers[0].work()
    assert upstream.answers == [([1, 3], b"\xc0")]
    a_node.receive(None, Answers([answer(0, 2)]))
    assert upstream.answers[1:] == [([2], b"\xc0")]


def test_a_relay_forwards_errors_and_parts_at_once_after_earlier_answers(node):
    a_node, upstream, _ = node
    a_node.receive(None, Answers([answer(0, 1)]))
    a_node.receive(None, Answers([answer(5, 2, b"part", more=True)]))
    assert upstream.answers == [([1], b"\xc0"), ([2], b"part")]
    a_node.receive(None, Answers([answer(0, 2, error="Traceback")]))
    assert upstream.answers[2:] == [([2], b"\xc0")]


def test_a_relay_rests_when_all_ranks_have_cancelled_their_wills(node):
    a_node, upstream, _ = node
    for will in ("lost/1", "lost/2", "lost/3"):
        a_node.change_disconnect_key("", will)
    a_node.change_disconnect_key("lost/1", "")
    assert isinstance(upstream.sent[-1], OnDisconnect) and not upstream.sent[-1].key  # this rank started the relay
    a_node.change_disconnect_key("lost/3", "")
    assert not a_node._drained.is_set()
    a_node.handle_disconnect(Connection(), "lost/2")
    assert upstream.sent[-1].key == "lost/2" and a_node._drained.is_set()
