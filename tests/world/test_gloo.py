"""Strangers at gloo's ports are not accepted as ranks: groups verify their members, and remote calls' bodies have digests."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from pipeline.files.encoding import encode
from pipeline.rpc import messages
from pipeline.store import auth, gloo
from pipeline.store.child_process import start as start_store
from pipeline.store.client import RunStore
from tests.generate.tiny import save
from tests.world.stranger import GUESSES, NAMED, Pickled, Stranger, shout, visited
from tests.world.worlds import SIZE

KEY = b"k" * 32


@pytest.fixture
def stores():
    """Yield two ranks' connections to a store."""
    process, address = start_store("127.0.0.1", KEY)
    yield [RunStore(address, KEY, 20) for _ in range(2)]
    process.kill()
    process.wait(10)
    process.stdin.close()
    process.stdout.close()


class Pair:
    """Two ranks, in threads, that make a group and verify it.

    The second rank joins once a stranger has connected to the first one's port.
    """

    def __init__(self, stores: list[RunStore], name: str, say: Callable[[int], bytes]):
        self.errors: dict[int, str] = {}
        self._groups: list[ProcessGroupGloo] = []
        stranger = Stranger([os.getpid()], say)
        threads = [threading.Thread(target=self._make, args=(stores[rank], name, rank)) for rank in range(2)]
        threads[0].start()
        while stranger.tried < len(GUESSES):
            time.sleep(0.001)
        threads[1].start()
        for thread in threads:
            thread.join(60)
        stranger.leave()
        self.taken = stranger.taken

    def _make(self, store: RunStore, name: str, rank: int) -> None:
        authenticator = gloo.GlooAuthenticator(store, rank, lambda rank: f"rank {rank} (train)", lambda phase: nullcontext())
        within = dist.PrefixStore(name, store)
        authenticator.offer(within, rank)
        try:
            group = ProcessGroupGloo(within, rank, 2, timedelta(seconds=20))
            authenticator.authenticate(group, within, [1 - rank])
            self._groups.append(group)  # its store must outlive the other rank
        except (
            auth.AuthenticationError,
            RuntimeError,
        ) as error:  # gloo's own error, if the first rank has ended before the second connects
            self.errors[rank] = str(error)


def code(nonce: bytes, sender: int, receiver: int) -> bytes:
    return auth.keyed_hmac(KEY, b"gloo", nonce + gloo.PAIR.pack(sender, receiver, gloo.TAG))


SAYS = {
    "garbage": lambda store, name: shout,
    "nothing": lambda store, name: lambda size: b"",
    "less than a code": lambda store, name: lambda size: b"S",
    "a code of another group": lambda store, name: lambda size: code(bytes(auth.NONCE), 1, 0),
    "the rank's own code": lambda store, name: lambda size: code(store.get(f"{name}/proof"), 0, 1),
}


@pytest.mark.parametrize("say", SAYS.values(), ids=SAYS)
def test_a_stranger_who_connects_first_is_not_accepted_as_a_rank(stores, monkeypatch, say):
    """In about half of the groups the rank that joins first is the one that listens; it depends on the ports."""
    monkeypatch.setattr(gloo, "WAIT_S", 2.0)
    asked = stores[0].clone()
    pairs = (Pair(stores, str(turn), say(asked, str(turn))) for turn in itertools.count())
    left_alone, taken = 0, 0
    while not (left_alone and taken):
        pair = next(pairs)
        if not pair.taken:
            left_alone += 1
            assert not pair.errors
            continue
        taken += 1
        assert pair.errors.keys() == {0, 1}
        words = "rank 1 (train) did not authenticate to rank 0 (train) in a gloo group of 2 ranks: "
        assert words in pair.errors[0]


def test_codes_are_valid_only_from_their_sender_in_their_group():
    codes = {code(nonce, *ranks) for nonce in (b"a" * 32, b"b" * 32) for ranks in ((0, 1), (1, 0), (0, 2), (2, 1))}
    assert len(codes) == 8


# ---- whole worlds -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setenv("WAITS", "1")
    monkeypatch.setenv("LATE_S", "0.3")
    monkeypatch.setenv("JOIN_S", "30")


def test_a_join_with_a_stranger_at_its_ports_fails_and_names_both_ranks(start, monkeypatch):
    monkeypatch.setenv("HELD", "1")
    monkeypatch.setenv("JOIN_S", "90")
    join = visited(start("visited joined"))
    assert NAMED.search(join.end), join
    assert join.taken and not join.foreign
    assert join.bound == {"127.0.0.1"}, "at another address than loopback though all ranks are on one node"


def test_ranks_that_connect_lazily_authenticate_to_rank_0(start, monkeypatch):
    """A world in which the stranger takes a pair with rank 0 fails. Whether it does depends on the ports."""
    monkeypatch.setenv("HELD", "1")
    monkeypatch.setenv("JOIN_S", "90")
    monkeypatch.setenv("SPARSE", "1")
    for _ in range(20):
        join = visited(start("visited joined"))
        assert not join.foreign, join
        if join.end != "went on":
            break
    assert NAMED.search(join.end), join
    assert join.taken and join.bound == {"127.0.0.1"}


@pytest.mark.parametrize("maker", ["mesh", *(pytest.param(one, marks=pytest.mark.full) for one in ("megatron", "vllm"))])
def test_a_strangers_pickle_is_not_loaded_in_groups_that_libraries_make(start, late, tmp_path, maker):
    world = start(f"visited {maker}")
    world.until("ready")
    join = visited(world, Pickled(tmp_path / "read"))
    assert not (tmp_path / "read").exists()
    assert NAMED.search(join.end) if join.taken else join.end == "went on", join


@pytest.mark.full
@pytest.mark.parametrize("visitor", [False, True])
def test_an_engine_of_two_ranks_with_and_without_a_stranger(start, late, tmp_path, visitor):
    world = start("visited engine")
    save(world.run_dir / "model", "llama", 0)
    world.until("ready")
    if not visitor:
        (world.run_dir / "visited").touch()
        assert world.wait() == [0] * SIZE, [world.log(rank)[-2000:] for rank in range(SIZE)]
        return
    join = visited(world, Pickled(tmp_path / "read"))
    assert not (tmp_path / "read").exists()
    assert NAMED.search(join.end) if join.taken else join.end == "went on", join
    assert join.bound == {"127.0.0.1"}


# ---- bodies -----------------------------------------------------------------------------------------------------------------


def test_a_body_from_another_sender_is_refused(monkeypatch):
    sent = encode("x" * messages.INLINE)
    world = SimpleNamespace(spanning=None, describe=lambda rank: f"rank {rank} (train)")
    monkeypatch.setattr(messages.dist, "recv", lambda body, source, **_: body.copy_(messages.as_tensor(sent)))
    received = messages.receive_body(world, len(sent), messages.digest(sent), 0, 3)
    assert bytes(received.numpy()) == sent
    other = messages.digest(sent[:-1] + b"y")
    with pytest.raises(auth.AuthenticationError, match=rf"the body of {len(sent)} bytes received from rank 3 \(train\) is not"):
        messages.receive_body(world, len(sent), other, 0, 3)
