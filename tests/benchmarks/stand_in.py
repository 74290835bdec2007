"""Stand in for many ranks and the relays of their nodes, in one process; `verbs.py` starts it.

Its first line of input, JSON: {"host", "port", "key", "nodes": [[rank, ...], ...], "leaders", "answers", "interval_s"}. Each
rank has a connection to the store, by which it says that it is here. The relay of a node is `pipeline.store.relay.Relay` over
a connection of its own; its ranks are objects here, which answer a verb as soon as they have it, and whose heartbeats it sends
on every `interval_s`. Whenever a line comes it prints a line of JSON with what its relays did since it began: {"requests",
"sent", "received", "cpu"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import time
from typing import Any

import msgspec

from pipeline.store import auth, messaging, table
from pipeline.store.relay import Relay, Upstream

CONNECT_S = 60.0
TOGETHER = 8  # ranks that share their samples, that make an engine, and that have a relay
DIGESTS = 128


class Counted:
    """Messages and bytes over this process's connections."""

    requests = sent = received = 0

    @classmethod
    def install(cls) -> None:
        seal, verify = auth.Channel.seal, auth.Channel.verify

        def counting_seal(self: auth.Channel, message: bytes) -> bytes:
            cls.requests += 1
            cls.sent += len(message) + auth.HEADER
            return seal(self, message)

        def counting_verify(self: auth.Channel, header: bytes, message: bytes) -> bytes:
            cls.received += len(message) + auth.HEADER
            return verify(self, header, message)

        auth.Channel.seal, auth.Channel.verify = counting_seal, counting_verify


class Rank:
    """A rank as a connection of its relay."""

    def __init__(self, number: int, relay: Relay, answers: dict[str, list[tuple[bytes, bool]]], leads: bool):
        self.number, self.relay, self.answers, self.leads = number, relay, answers, leads

    def push(self, messages: list[Any]) -> None:
        for call, _, message in messages:
            verb = msgspec.msgpack.decode(message)[1]
            for body, more in self._bodies(verb) if call != messaging.NO_CALL else ():
                answer = messaging.VerbReply(call, [self.number], verb, body, more=more, account=(1.0, 2.0))
                self.relay.receive(self, messaging.Answers([answer]))

    def _bodies(self, verb: str) -> list[tuple[bytes, bool]]:
        if verb in ("send", "receive"):  # each rank's own answer, with digests of DIGESTS parts
            digests = {"keys": ["<i4", [DIGESTS], bytes(4 * DIGESTS)], "hashes": ["<u8", [DIGESTS], bytes(8 * DIGESTS)]}
            return [(msgspec.msgpack.encode({"sent": self.number, **digests}), False)]
        if verb == "estimate":  # the same for ranks that share their samples
            moments = {"sum": float(self.number // TOGETHER), "squares": 2.0, "counts": {"tokens": 100, "sequences": 10}}
            return [(msgspec.msgpack.encode([moments]), False)]
        if verb == "rollout" and not self.leads:
            return [(messaging.NOTHING, False)]
        if verb == "hang" and self.number == 5:
            return []
        return self.answers.get(verb, [(b"\xc0", False)])


def arrive(number: int, address: tuple[str, int], key: bytes, node: int) -> socket.socket:
    """Return a rank's own connection to the store."""
    connection, channel = auth.connect(address, key, time.monotonic() + CONNECT_S)
    connection.sendall(channel.seal(msgspec.msgpack.encode(table.Set(f"here/{number}", b"node%d" % node))))
    return connection


async def _node(
    ranks: list[int], told: dict[str, Any], address: tuple[str, int], key: bytes, answers: dict[str, list[tuple[bytes, bool]]]
) -> Relay:
    connection, channel = auth.connect(address, key, time.monotonic() + CONNECT_S)
    relay = Relay(key, ranks[0])
    _, upstream = await asyncio.get_running_loop().create_connection(lambda: Upstream(channel, relay), sock=connection)
    relay.connect(upstream)
    for number in ranks:
        relay.receive(Rank(number, relay, answers, number in told["leaders"]), messaging.Subscribe([number]))
    return relay


async def _beat(relay: Relay, ranks: list[int], interval_s: float) -> None:
    """Give each rank a new status to report, every time."""

    class Quiet:
        def reply(self, _: table.Reply) -> None: ...

    for count in itertools.count():
        for rank in ranks:
            beat = msgspec.msgpack.encode([count, "node", "step", "forward of the policy"])
            relay.handle(Quiet(), table.Exchange({f"beat/{rank}": beat}, ["failed", "beat/0", "lost/0"]))
        relay.exchange_heartbeats()
        await asyncio.sleep(interval_s)


async def _run(told: dict[str, Any]) -> None:
    key, address = bytes.fromhex(told["key"]), (told["host"], told["port"])
    told["leaders"] = set(told["leaders"])
    answers = {verb: [(bytes.fromhex(body), more) for body, more in parts] for verb, parts in told["answers"].items()}
    arrived = [arrive(rank, address, key, i) for i, ranks in enumerate(told["nodes"]) for rank in ranks]
    nodes = told["nodes"]
    relays = [await _node(ranks, told, address, key, answers) for ranks in nodes]
    beats = [asyncio.ensure_future(_beat(relay, ranks, told["interval_s"])) for relay, ranks in zip(relays, nodes, strict=True)]
    sink = await asyncio.start_server(_discard, "127.0.0.1", 0, limit=1 << 22)
    print(sink.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(
            json.dumps(
                {"requests": Counted.requests, "sent": Counted.sent, "received": Counted.received, "cpu": time.process_time()}
            ),
            flush=True,
        )
    for beat in beats:
        beat.cancel()
    for connection in arrived:
        connection.close()


async def _discard(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.CancelledError):  # the end of the process
        while await reader.read(1 << 22):
            pass


if __name__ == "__main__":
    Counted.install()
    asyncio.run(_run(json.loads(sys.stdin.readline())))
