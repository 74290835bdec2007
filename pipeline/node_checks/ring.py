"""Exchange messages between neighbours in the ring of nodes, to measure bandwidth and the difference of clocks.

Each node is measured with both its neighbours, in rounds in which it has at most one partner: two rounds for an even number of
nodes, three for an odd one. A slow node makes both its links slow, but each of its neighbours still has a fast link on the
other side, so the slow end of a link can be found. A node without any fast link is measured once more, with a node that has
one.

Messages go between the first ranks of the nodes, one way at a time: over NCCL between GPUs, otherwise over gloo, also if train
and generate ranks share GPUs. An exchange runs in a thread that is abandoned if it hangs. gloo's own timeouts would also close
the connections to all other ranks, and a healthy neighbour of a dead node would seem dead. The memory that NCCL allocates for a
pair stays allocated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from pipeline.job.world import World

TURNS = 2  # the ring, then the second measurement
MOST_ROUNDS = 8  # of the second measurement
LINK_S = 20.0
"""Time limit of one message. The first has 1 MiB, so a link below 50 kB/s counts as broken."""
PINGS = 5
PROBE_BYTES = 1 << 20  # its time determines the size of the measured message
MOST_BYTES = 64 << 20
TAG = 1 << 20  # used by nothing else, so an abandoned exchange takes no other message
GOAL_S = 0.03
"""Target duration of the measured message: long compared with latency, but short."""

Pair = tuple[int, int]  # the first ranks of two nodes, ascending: the one that sends first, and the other
Rounds = list[list[Pair]]


class Link(msgspec.Struct, array_like=True):
    """A measured link between the first ranks of two nodes."""

    opener: int
    other: int
    gb_per_s: float = 0.0  # the mean of both directions; 0 if the link is dead
    ahead_s: float = 0.0  # seconds that the other's clock is ahead of the opener's
    error_s: float = 0.0  # bound on the error of ahead_s: half the shortest round trip (Cristian 1989); 0: not measured
    problem: str = ""


def bound_s(rounds: int) -> float:
    """Return the longest time of an exchange: in each round one message of this rank and one of its partner may hang."""
    return (rounds + 1) * 2 * LINK_S


# ---- pairs and rounds -------------------------------------------------------------------------------------------------------


def ring(members: list[int]) -> Rounds:
    """Return the pairs of a ring, in rounds. members: the first rank of each node, in the ring's order."""
    around = zip(members, members[1:] + members[:1], strict=True)
    pairs = [(min(pair), max(pair)) for pair in around]
    return _in_rounds(pairs if len(pairs) > 2 else pairs[1:])  # two nodes have one link, a single node has none


def remeasure_pairs(links: dict[Pair, Link], least: float | None) -> Rounds:
    """Return the pairs to measure once more.

    Each node without a fast link gets a partner that has one. Slow links between two nodes that have fast links are measured
    again too, but dead links are not.
    """
    suspects, fast = split_by_speed(links, least)
    if not fast:
        return []
    between_fast = {pair: link for pair, link in links.items() if not suspects & set(pair) and not link.problem}
    pairs = [pair for pair, link in between_fast.items() if _slow(link, least)]
    for i, suspect in enumerate(sorted(suspects)):
        partners = [*fast[i % len(fast) :], *fast[: i % len(fast)]]  # spread the suspects over the partners
        tries = [(min(suspect, partner), max(suspect, partner)) for partner in partners]
        pairs.append(next((pair for pair in tries if pair not in links), tries[0]))
    return _in_rounds(pairs)[:MOST_ROUNDS]


def split_by_speed(links: dict[Pair, Link], least: float | None) -> tuple[set[int], list[int]]:
    """Return (ranks that have only slow links, ranks that have a fast one)."""
    ranks = {rank for pair in links for rank in pair}
    fast = {rank for pair, link in links.items() if not _slow(link, least) for rank in pair}
    return ranks - fast, sorted(fast)


def _slow(link: Link, least: float | None) -> bool:
    """Return whether a link is slow. least: GB/s; None if only a dead link counts."""
    return bool(link.problem) or (least is not None and link.gb_per_s < least)


def better(link: Link, earlier: Link | None) -> Link:
    """Return the better of two measurements of one pair."""
    return link if earlier is None or link.gb_per_s >= earlier.gb_per_s else earlier


def _in_rounds(pairs: list[Pair]) -> Rounds:
    """Assign each pair to the first round in which both ranks are free."""
    rounds: Rounds = []
    busy: list[set[int]] = []
    for pair in [*pairs[0::2], *pairs[1::2]]:
        number = next((i for i, members in enumerate(busy) if members.isdisjoint(pair)), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(pair)
        busy[number].update(pair)
    return rounds


# ---- the exchange -----------------------------------------------------------------------------------------------------------


def exchange(world: World, turn: int, rounds: Rounds) -> list[Link]:
    """Take part in all rounds; return the links that this rank opened."""
    links = []
    for number, pairs in enumerate(rounds):
        for pair in pairs:
            if world.rank in pair:
                peer = sum(pair) - world.rank
                with world.phase(f"exchange messages with rank {peer}"):
                    link = _measure(world, Link(*pair), peer, f"nodes/meet/{turn}/{number}", bound_s(number))
                links += [link] if link.opener == world.rank else []
    return links


def _measure(world: World, link: Link, peer: int, key: str, timeout_s: float) -> Link:
    """Measure the link to `peer` and return it; only the link's opener gets results.

    timeout_s: to wait for the peer, which may hang in an earlier round.
    """
    world.store.set(f"{key}/{world.rank}", world.carrier.type)
    try:
        world.store.wait([f"{key}/{peer}"], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        link.problem = f"its rank {peer} has not started the exchange within {timeout_s:g} s"
        return link
    try:
        both = {world.carrier.type, world.store.get(f"{key}/{peer}").decode()}
        wire = Wire(world, peer, world.carrier if both == {"cuda"} else torch.device("cpu"))
        wire.run(wire.measure if world.rank == link.opener else wire.answer, link)
    except (RuntimeError, TimeoutError) as error:  # gloo's and NCCL's are RuntimeErrors
        link.problem = str(error).partition("\n")[0][:200] or type(error).__name__
    return link


class Wire:
    """A scripted exchange of messages between this rank and another."""

    def __init__(self, world: World, peer: int, device: torch.device):
        self._group, self._peer, self._device = world.spanning, peer, device
        self._progress_at = time.monotonic()
        self._error: Exception | None = None

    def run(self, script: Callable[[Link], None], link: Link) -> None:
        """Run `script`, `measure` or `answer`, in a thread. Raises its error, and TimeoutError if a message takes LINK_S."""
        thread = threading.Thread(target=self._run_script, args=(script, link), name=f"wire to {self._peer}", daemon=True)
        thread.start()
        while thread.is_alive():
            if (left := self._progress_at + LINK_S - time.monotonic()) < 0:
                raise TimeoutError(f"no answer for {LINK_S:g} s")
            thread.join(left + 0.001)
        if self._error:
            raise self._error

    def _run_script(self, script: Callable[[Link], None], link: Link) -> None:
        try:
            if self._device.type == "cpu":
                script(link)
            else:
                with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):  # another's may be stuck
                    script(link)
        except Exception as error:
            self._error = error

    def measure(self, link: Link) -> None:
        """Measure the clock offset and the speed to the peer, which runs `answer`, and write them into `link`."""
        ahead_s, error_s = self._compare_clocks()
        self._round_trip(1)  # with the first message NCCL makes a communicator, which takes seconds
        seconds = self._round_trip(PROBE_BYTES)
        size = int(min(MOST_BYTES, max(PROBE_BYTES, PROBE_BYTES * GOAL_S / (seconds / 2))))
        self._send(torch.tensor([size]))
        speed = 2 * size / self._round_trip(size) / 1e9
        link.ahead_s, link.error_s, link.gb_per_s = ahead_s, error_s, speed

    def answer(self, link: Link) -> None:
        """Reply to the messages of the peer, which runs `measure`. `link` stays unchanged."""
        for _ in range(PINGS):
            self._receive(torch.zeros(1, dtype=torch.float64))
            self._send(torch.tensor([time.time()], dtype=torch.float64))
        self._echo(1)
        self._echo(PROBE_BYTES)
        self._echo(int(self._receive(torch.tensor([0]))))

    def _compare_clocks(self) -> tuple[float, float]:
        """Return (seconds that the peer's clock is ahead, error), from the shortest of several round trips."""
        best = (0.0, float("inf"))
        for _ in range(PINGS):
            start, sent = time.time(), time.perf_counter()
            self._send(torch.zeros(1, dtype=torch.float64))
            theirs = self._receive(torch.zeros(1, dtype=torch.float64)).item()
            half = (time.perf_counter() - sent) / 2
            if half < best[1]:
                best = (theirs - (start + half), half)
        return best

    def _round_trip(self, size: int) -> float:
        """Return the seconds that a message takes there and back."""
        message = torch.zeros(size, dtype=torch.uint8, device=self._device)
        start = time.perf_counter()
        self._send(message)
        self._receive(message)
        return time.perf_counter() - start

    def _echo(self, size: int) -> None:
        message = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._send(self._receive(message))

    def _send(self, message: torch.Tensor) -> None:
        self._wait(dist.isend(message, self._peer, group=self._group, tag=TAG))

    def _receive(self, message: torch.Tensor) -> torch.Tensor:
        self._wait(dist.irecv(message, self._peer, group=self._group, tag=TAG))
        return message

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None  # both ranks are in the spanning group
        work.wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # NCCL's wait is the stream's
        self._progress_at = time.monotonic()
