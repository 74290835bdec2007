"""Run a node's relay, `python -m pipeline.store.relay`. The node's first rank starts it (`world.py`); both end together.

It forwards messages and heartbeats between the ranks of its node and rank 0's store. So the store has one connection for the
messages of a node instead of one for each rank, and sends and receives one message instead of many equal ones:

- A verb arrives once for all ranks of the node, and the relay sends it to each rank.
- Equal replies of its ranks are merged, and sent when all ranks of the call have replied, or after HOLD_S. Errors and parts of
  replies are sent at once, after the waiting replies.
- Changed heartbeats are sent together every `interval_s`. So the values that its ranks read may be `interval_s` old.
- The loss of a rank's connection is reported at once. The relay's own end is reported as the loss of the rank that started it;
  at the end of a run this rank waits until no other rank needs the relay.

Ranks authenticate to the relay, and the relay to the store (`auth.py`). It listens on loopback only.
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
from typing_extensions import override

from pipeline.files import rank_log
from pipeline.store import auth, messaging
from pipeline.store.child_process import START_S, Address, launch, read_parameters
from pipeline.store.server import Connection, Server, serve
from pipeline.store.table import Exchange, OnDisconnect, Reply, Set, StoreRequest

logger = logging.getLogger("pipeline.store.relay")  # `__name__` is `__main__` in this process

HOLD_S = 0.02
"""Seconds that a reply waits for equal replies of other ranks."""
STORE_GONE = 3  # a relay's exit status when it has lost the store

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode


def start(upstream: Address, key: bytes, rank: int, interval_s: float, timeout_s: float) -> tuple[subprocess.Popen, Address]:
    """Start a relay on this machine. It ends with the calling thread or the returned handle.

    upstream: the store's address. rank: the rank that starts it. interval_s: between exchanges of heartbeats with the store.
    timeout_s: of the connection to the store. Raises the errors of `launch`.
    """
    parameters = {"key": key.hex(), "upstream": list(upstream), "rank": rank, "interval_s": interval_s, "timeout_s": timeout_s}
    return launch("pipeline.store.relay", "127.0.0.1", parameters, timeout_s + START_S)


class Upstream(asyncio.Protocol):
    """The relay's connection to the store. Requests do not wait for replies; only replies with values are used."""

    def __init__(self, channel: auth.Channel, relay: Relay):
        self._channel, self._relay = channel, relay
        self._buffer = bytearray()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, request: StoreRequest) -> None:
        """Send a request without waiting for its reply."""
        self._transport.write(self._channel.seal(_encode(request)))

    @override
    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := auth.next_message(self._channel, self._buffer)) is not None:
                reply = _decode(message)
                if reply.pushed:
                    self._relay.deliver(reply.value)
                elif isinstance(reply.value, list):
                    self._relay.update(reply.value)
        except (auth.AuthenticationError, msgspec.DecodeError) as error:
            logger.error("the relay closes its connection to the store: %s", error)
            self._transport.close()


class Relay(Server):
    """Serves the ranks of this node: handles their requests for messages and heartbeats."""

    def __init__(self, key: bytes, rank: int):
        super().__init__(key)
        self._disconnect_key = f"lost/{rank}"
        self._disconnect_keys: set[str] = set()  # of this node's ranks
        self._drained = asyncio.Event()  # no rank has a disconnect key
        self._drained.set()
        self._router = messaging.Router()
        self._due: Counter[int] = Counter()  # by call: the number of this node's ranks that have not ended their reply
        self._waiting_replies: dict[tuple[int, bytes], messaging.VerbReply] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._changed: dict[str, bytes] = {}  # heartbeats not yet sent to the store
        self._values: dict[str, bytes | None] = {}  # keys that this node's ranks read, with their latest values
        self._requested: list[str] = []  # keys of the exchange that the store has not replied to

    def connect(self, upstream: Upstream) -> None:
        """Use this connection to the store, and register the relay's disconnect key."""
        self._upstream = upstream
        upstream.send(OnDisconnect(self._disconnect_key))

    # ---- requests of this node's ranks ----------------------------------------------------------------------------------

    @override
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

    @override
    def handle(self, connection: Connection, request: StoreRequest) -> None:
        if not isinstance(request, Exchange):
            connection.reply(Reply(error="a relay accepts only messages and heartbeats"))
            return
        self._changed |= request.values
        for key in request.keys:
            self._values.setdefault(key, None)
        connection.reply(Reply([self._values[key] for key in request.keys]))

    @override
    def handle_disconnect(self, connection: Connection, key: str) -> None:
        self._router.leave(connection)
        if key:
            self._upstream.send(Set(key, b""))
            self._disconnect_keys.discard(key)
            self._update_drained()

    @override
    def change_disconnect_key(self, old_key: str, new_key: str) -> None:
        self._disconnect_keys.discard(old_key)
        self._disconnect_keys |= {new_key} - {""}
        if old_key == self._disconnect_key and not new_key:
            self._upstream.send(OnDisconnect(""))
        self._update_drained()

    @override
    async def drain(self) -> None:
        """Wait until no rank uses this relay, because each has cancelled its disconnect key."""
        await self._drained.wait()

    def _update_drained(self) -> None:
        if self._disconnect_keys:
            self._drained.clear()
        else:
            self._drained.set()

    # ---- answers ----------------------------------------------------------------------------------------------------------

    def _take(self, answer: messaging.VerbReply) -> None:
        if not answer.more and answer.call in self._due:
            self._due[answer.call] -= len(answer.ranks)
            if not self._due[answer.call]:
                del self._due[answer.call]
        if not messaging.mergeable(answer):
            self._flush([answer])
            return
        messaging.merge(self._waiting_replies, answer)
        if answer.call not in self._due:
            self._flush()
        elif not self._timer:
            self._timer = asyncio.get_running_loop().call_later(HOLD_S, self._flush)

    def _flush(self, last_answers: list[messaging.VerbReply] | None = None) -> None:
        """Send the waiting replies in order of arrival, then `last_answers`."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        answers = [*self._waiting_replies.values(), *(last_answers or [])]
        self._waiting_replies = {}
        for batch in messaging.batches(answers, messaging.size_of):
            self._upstream.send(messaging.Answers(batch))

    # ---- the store ----------------------------------------------------------------------------------------------------------

    def deliver(self, messages: list[tuple[int, list[int], bytes]]) -> None:
        """Forward verbs to this node's ranks. messages: (call, ranks, message)."""
        for call, ranks, message in messages:
            if call != messaging.NO_CALL:
                self._due[call] += len(ranks)
            self._router.send(call, [(ranks, message)])

    def exchange_heartbeats(self) -> None:
        """Send changed heartbeats and request the keys that ranks read, unless the last request has no reply yet."""
        if not self._requested and (self._changed or self._values):
            self._requested = list(self._values)
            self._upstream.send(Exchange(self._changed, self._requested))
            self._changed = {}

    def update(self, values: list[bytes | None]) -> None:
        """Store the values of the reply to `exchange_heartbeats`."""
        self._values |= dict(zip(self._requested, values, strict=True))
        self._requested = []


async def _run(parameters: dict[str, Any], key: bytes, connection: socket.socket, channel: auth.Channel) -> int:
    """Run the relay until no rank needs it or the store is gone, and return the exit status."""
    relay = Relay(key, parameters["rank"])
    _, upstream = await asyncio.get_running_loop().create_connection(lambda: Upstream(channel, relay), sock=connection)
    relay.connect(upstream)

    async def beat() -> None:
        while True:
            relay.exchange_heartbeats()
            await asyncio.sleep(parameters["interval_s"])

    tasks = [asyncio.ensure_future(work) for work in (beat(), serve(relay, parameters["address"]), upstream.lost)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return STORE_GONE if upstream.lost.done() else 0


def main() -> None:
    """Run a relay's process."""
    rank_log.log_to_stderr()
    parameters = read_parameters()
    key = bytes.fromhex(parameters["key"])
    try:
        connection, channel = auth.connect(tuple(parameters["upstream"]), key, time.monotonic() + parameters["timeout_s"])
    except OSError as error:
        logger.error("the relay of rank %d gives up: the store of rank 0: %s", parameters["rank"], error)
        sys.exit(1)
    sys.exit(asyncio.run(_run(parameters, key, connection, channel)))


if __name__ == "__main__":
    main()
