"""A node's relay: `python -m pipeline.store.relay`, which the first rank of a node starts (`world.py`), and which ends with it.

It stands between the ranks of its node and the store of rank 0, for mail and heartbeats alone, so that rank 0's store has one
connection for a node's mail, not one for each rank, and one message where eight would say the same:

- A verb comes once for all ranks of the node, and goes to each.
- Equal answers of its ranks go on as one, when all that were asked have answered, or after HOLD_S. Errors and parts of answers
  go on at once, and what came before them goes first.
- Heartbeats are kept, and those that have changed go on together, every `interval_s`. What its ranks look at is as old as that.
- A rank whose connection is lost is told of at once. The relay's own end is told as the loss of the rank that started it, which
  waits at the end of a run until the others need it no more.

Ranks prove themselves to it, and it to the store, as everyone does (`auth.py`). It listens on this machine alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import msgspec

from pipeline import rank_log
from pipeline.store import auth, messaging
from pipeline.store.server import START_S, Address, Connection, Server, launch, read_parameters, serve
from pipeline.store.table import Exchange, OnDisconnect, Reply, Request, Set

logger = logging.getLogger("pipeline.store.relay")  # its own process, where `__name__` is `__main__`

HOLD_S = 0.02
STORE_GONE = 3  # a relay's exit status when it has lost the store

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode


def start(upstream: Address, key: bytes, rank: int, interval_s: float, timeout_s: float) -> tuple[subprocess.Popen, Address]:
    """Start a relay on this machine. It lives as long as the calling thread and the returned handle.

    upstream: the store's. rank: who starts it. interval_s: between two exchanges of heartbeats with the store.
    timeout_s: of connecting to the store. Raises what `launch` raises.
    """
    told = {"key": key.hex(), "upstream": list(upstream), "rank": rank, "interval_s": interval_s, "timeout_s": timeout_s}
    return launch("pipeline.store.relay", "127.0.0.1", told, timeout_s + START_S)


class Upstream(asyncio.Protocol):
    """The connection to the store. Requests are sent without waiting; of the replies only those with values are looked at."""

    def __init__(self, channel: auth.Channel, relay: Relay):
        self._channel, self._relay = channel, relay
        self._buffer = bytearray()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, request: Request) -> None:
        self._transport.write(self._channel.seal(_encode(request)))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := auth.next_message(self._channel, self._buffer)) is not None:
                reply = _decode(message)
                if reply.pushed:
                    self._relay.deliver(reply.value)
                elif isinstance(reply.value, list):
                    self._relay.see(reply.value)
        except (auth.AuthenticationError, msgspec.DecodeError) as error:
            logger.error("the relay closes its connection to the store: %s", error)
            self._transport.close()


class Relay(Server):
    """What `server.Connection` asks of a store, for the ranks of one node."""

    def __init__(self, key: bytes, rank: int):
        super().__init__(key)
        self._disconnect_key = f"lost/{rank}"
        self._disconnect_keys: set[str] = set()  # of ranks here
        self._drained = asyncio.Event()  # there are none
        self._drained.set()
        self._router = messaging.Router()
        self._due: Counter[int] = Counter()  # of each call: the ranks here that have not ended their answer
        self._held: dict[tuple[int, bytes], messaging.Answer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._beats: dict[str, bytes] = {}  # that have changed
        self._seen: dict[str, bytes | None] = {}  # what ranks here look at
        self._looked: list[str] = []  # asked of the store, which has not replied yet

    def connect(self, upstream: Upstream) -> None:
        self._upstream = upstream
        upstream.send(OnDisconnect(self._disconnect_key))

    # ---- what ranks of this node ask ------------------------------------------------------------------------------------

    def receive(self, connection: Connection, request: messaging.OneWay) -> None:
        match request:
            case messaging.Subscribe(ranks):
                self._router.subscribe(connection, ranks)
                self._upstream.send(request)
            case messaging.Answers(answers):
                for answer in answers:
                    self._take(answer)
            case _:
                connection.refuse("only rank 0 sends verbs")

    def ask(self, connection: Connection, request: Request) -> None:
        if not isinstance(request, Exchange):
            connection.reply(Reply(error="a relay takes mail and heartbeats alone"))
            return
        self._beats |= request.values
        for key in request.keys:
            self._seen.setdefault(key, None)
        connection.reply(Reply([self._seen[key] for key in request.keys]))

    def part(self, connection: Connection, will: str) -> None:
        self._router.leave(connection)
        if will:
            self._upstream.send(Set(will, b""))
            self._disconnect_keys.discard(will)
            self._update_drained()

    def change_disconnect_key(self, before: str, after: str) -> None:
        self._disconnect_keys.discard(before)
        self._disconnect_keys |= {after} - {""}
        if before == self._disconnect_key and not after:
            self._upstream.send(OnDisconnect(""))
        self._update_drained()

    async def drain(self) -> None:
        """Wait until all ranks have taken back what is to be set at their loss: until then they go through this relay."""
        await self._drained.wait()

    def _update_drained(self) -> None:
        if self._disconnect_keys:
            self._drained.clear()
        else:
            self._drained.set()

    # ---- answers ----------------------------------------------------------------------------------------------------------

    def _take(self, answer: messaging.Answer) -> None:
        if not answer.more and answer.call in self._due:
            self._due[answer.call] -= len(answer.ranks)
            if not self._due[answer.call]:
                del self._due[answer.call]
        if not messaging.final(answer):
            self._flush([answer])
            return
        messaging.join(self._held, answer)
        if answer.call not in self._due:
            self._flush()
        elif not self._timer:
            self._timer = asyncio.get_running_loop().call_later(HOLD_S, self._flush)

    def _flush(self, last: list[messaging.Answer] | None = None) -> None:
        """What is held, in the order in which it came, and then `last`."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        answers = [*self._held.values(), *(last or [])]
        self._held = {}
        for batch in messaging.batches(answers, messaging.weight):
            self._upstream.send(messaging.Answers(batch))

    # ---- the store ----------------------------------------------------------------------------------------------------------

    def deliver(self, messages: list[tuple[int, list[int], bytes]]) -> None:
        for call, ranks, message in messages:
            if call != messaging.NO_CALL:
                self._due[call] += len(ranks)
            self._router.send(call, [(ranks, message)])

    def beat(self) -> None:
        """Exchange heartbeats with the store, unless it still owes the last reply."""
        if not self._looked and (self._beats or self._seen):
            self._looked = list(self._seen)
            self._upstream.send(Exchange(self._beats, self._looked))
            self._beats = {}

    def see(self, values: list[bytes | None]) -> None:
        """What the store replies to `beat`."""
        self._seen |= dict(zip(self._looked, values, strict=True))
        self._looked = []


async def _run(told: dict[str, Any], key: bytes, connection: socket.socket, channel: auth.Channel) -> int:
    """Relay until nobody here needs it or the store is gone, and return the exit status."""
    relay = Relay(key, told["rank"])
    _, upstream = await asyncio.get_running_loop().create_connection(lambda: Upstream(channel, relay), sock=connection)
    relay.connect(upstream)

    async def beat() -> None:
        while True:
            relay.beat()
            await asyncio.sleep(told["interval_s"])

    tasks = [asyncio.ensure_future(work) for work in (beat(), serve(relay, told["address"]), upstream.lost)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return STORE_GONE if upstream.lost.done() else 0


def main() -> None:
    rank_log.log_to_stderr()
    told = read_parameters()
    key = bytes.fromhex(told["key"])
    try:
        connection, channel = auth.connect(tuple(told["upstream"]), key, time.monotonic() + told["timeout_s"])
    except OSError as error:
        logger.error("the relay of rank %d gives up: the store of rank 0: %s", told["rank"], error)
        sys.exit(1)
    sys.exit(asyncio.run(_run(told, key, connection, channel)))


if __name__ == "__main__":
    main()
