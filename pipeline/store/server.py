"""The store's server process beside rank 0, `python -m pipeline.store.server`: `start` starts it, and it ends with rank 0.

It holds keys and queues (`table.py`), which torch uses too, and routes verbs and answers (`messaging.py`). In large worlds each
node has a relay (`relay.py`), which connects to the server on behalf of its ranks.

The process reads its parameters as JSON from the first line of stdin, prints the port on which it listens, and ends when stdin
closes. The key is on no command line and in no environment, where others could see it.

A client must authenticate within AUTH_TIMEOUT_S (`auth.py`) before the server reads anything else from it. At most
MAX_UNAUTHENTICATED connections, and at most half of the process's file descriptors, may be unauthenticated; a new one closes
the oldest, which may connect again. One thread handles everything, so that requests have an order. The process imports only the
standard library and msgspec and starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline import rank_log
from pipeline.sandbox import linux
from pipeline.store import auth, messaging
from pipeline.store.table import ANY, EMPTY, TIMED_OUT, Missing, OnDisconnect, Pop, Reply, Request, Set, Table

logger = logging.getLogger("pipeline.store.server")  # its own process, where `__name__` is `__main__`

ROOT = Path(__file__).parents[2]
MAX_UNAUTHENTICATED = 2048
ACCEPTED = 16
"""Connections that are accepted before anything else is looked at: so few that ranks are answered in between, and that those
which are being closed to make room for others hold few open files."""
SPARE = 128
"""Open files that are kept for those, and for what the process itself opens."""
QUEUED = 4096
"""Connections that the kernel keeps until they are accepted: thousands of ranks may connect at once."""
START_S = 60.0  # until a process listens; Python's start may be slow on a busy file system
TOLD = 20  # refusals that are printed, and errors

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ANY | messaging.ANY).decode


class Address(NamedTuple):
    host: str
    port: int


class Server(ABC):
    """What a store and a relay have in common: who has connected without a proof, and who was refused."""

    def __init__(self, key: bytes):
        self.key = key
        self.unauthenticated: dict[Connection, None] = {}  # oldest first
        self.authenticated: set[Connection] = set()
        self._told: set[tuple[str, str]] = set()
        self._failed: set[str] = set()

    def admit(self, connection: Connection) -> None:
        self.unauthenticated[connection] = None
        while len(self.unauthenticated) > self._room():
            next(iter(self.unauthenticated)).drop("too many have connected without a proof")

    def _room(self) -> int:
        """Return how many connections without a proof may be open."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(MAX_UNAUTHENTICATED, files // 2, files - len(self.authenticated) - SPARE))

    def fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print an error that asyncio has caught, each once, and not without end: strangers can repeat some of them."""
        what = f"{context['message']}: {context.get('exception')!r}"
        if what not in self._failed and len(self._failed) < TOLD:
            self._failed.add(what)
            loop.default_exception_handler(context)

    def tell(self, host: str, why: str) -> None:
        """Once for each host and reason, and not without end: a stranger must not fill the disk."""
        if (host, why) in self._told or len(self._told) >= TOLD:
            return
        self._told.add((host, why))
        more = "; more are not told" if len(self._told) == TOLD else ""
        logger.warning("refused a connection from %s: %s%s", host, why, more)  # on a full disk logging drops it

    @abstractmethod
    def receive(self, connection: Connection, request: messaging.OneWay) -> None:
        """Take in what is not replied to."""

    @abstractmethod
    def ask(self, connection: Connection, request: Request) -> None:
        """Reply to a request, now or when there is something to reply."""

    @abstractmethod
    def part(self, connection: Connection, will: str) -> None:
        """Take note that a proven connection has ended."""

    def forget(self, connection: Connection, slot: tuple[str, ...]) -> None:  # noqa: B027 a relay has none
        """Drop the request of a connection that waits for `slot`."""

    def change_disconnect_key(self, before: str, after: str) -> None:  # noqa: B027 a store has nothing to do
        """What is to be set when some connection ends; empty: nothing."""

    async def drain(self) -> None:  # noqa: B027 a store does not wait
        """Wait for those who still need this process, once its input has ended."""


class StoreServer(Server):
    """The table, the mail, and who waits for what is not there yet."""

    def __init__(self, key: bytes):
        super().__init__(key)
        self.table = Table()
        self._router, self._calls = messaging.Router(), messaging.PendingCalls()
        self._waiting: dict[tuple[str, ...], dict[Connection, Request]] = {}  # in the order they came

    def receive(self, connection: Connection, request: messaging.OneWay) -> None:
        """Take in what is not replied to."""
        match request:
            case messaging.Subscribe(ranks):
                self._router.subscribe(connection, ranks)
            case messaging.Send(call, parts):
                self._calls.begin(request)
                self._router.send(call, parts)
            case messaging.Answers(answers):
                for answer in answers:
                    self._calls.accept(answer)
        if self._calls.ready():
            self.wake(("answers",))

    def ask(self, connection: Connection, request: Request) -> None:
        """Answer now, or when what it waits for is there."""
        try:
            value = (self._calls if isinstance(request, messaging.Collect | messaging.Unanswered) else self.table).apply(
                request
            )
        except Missing as missing:
            if isinstance(request, Pop) and request.timeout_s == 0:
                connection.reply(Reply(error=EMPTY))
            else:
                self._waiting.setdefault(missing.slot, {})[connection] = request
                connection.wait(missing.slot, request.timeout_s)
            return
        except ValueError as error:  # of this request alone
            connection.reply(Reply(error=str(error)))
            return
        connection.reply(Reply(value))
        for slot in self.table.filled(request):
            self.wake(slot)

    def wake(self, slot: tuple[str, ...]) -> None:
        for connection, request in self._waiting.pop(slot, {}).items():
            self.ask(connection, request)

    def forget(self, connection: Connection, slot: tuple[str, ...]) -> None:
        """It does not wait any more."""
        waiting = self._waiting.get(slot, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(slot, None)

    def part(self, connection: Connection, will: str) -> None:
        """A connection has ended, perhaps with a key that is to be set then."""
        self._router.leave(connection)
        if will:
            self.table.apply(Set(will, b""))
            self.wake(("key", will))


class Connection(asyncio.Protocol):
    def __init__(self, store: Server):
        self._store = store
        self._buffer = bytearray()
        self._channel: auth.Channel | None = None
        self._disconnect_key = ""
        self._slot: tuple[str, ...] | None = None  # of what it waits for
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # ---- opening ------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._host = (transport.get_extra_info("peername") or ("?",))[0]
        self._challenge = auth.challenge()
        self._timer = asyncio.get_running_loop().call_later(auth.AUTH_TIMEOUT_S, self.drop, "it said nothing that proves it")
        self._store.admit(self)
        transport.write(self._challenge)

    def refuse(self, why: str) -> None:
        """Close the connection for good: the client is told not to try again."""
        self._transport.write(auth.REFUSED)
        self.drop(why)

    def drop(self, why: str) -> None:
        """Close the connection. A client that knows the key tries again."""
        self._store.tell(self._host, why)
        self._transport.close()
        self._closed()

    def _authenticate(self) -> None:
        if len(self._buffer) < auth.ANSWER:
            return
        own, self._channel = auth.accept(self._store.key, self._challenge, bytes(self._buffer[: auth.ANSWER]))
        del self._buffer[: auth.ANSWER]
        self._timer.cancel()
        self._store.unauthenticated.pop(self, None)
        self._store.authenticated.add(self)
        self._transport.write(own)

    # ---- requests -----------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._buffer += data
        try:
            if not self._channel:
                self._authenticate()
            while self._channel and (message := auth.next_message(self._channel, self._buffer)) is not None:
                self._handle(_decode(message))
                if self._transport.is_closing():  # it was refused, or is gone: asyncio logs each reply to it
                    return
        except (auth.AuthenticationError, msgspec.DecodeError) as error:
            self.refuse(str(error))

    def _handle(self, request: Request) -> None:
        if isinstance(request, messaging.OneWay):
            self._store.receive(self, request)
        elif isinstance(request, OnDisconnect):
            self._store.change_disconnect_key(self._disconnect_key, request.key)
            self._disconnect_key = request.key
            self.reply(Reply())
        else:
            self._since = asyncio.get_running_loop().time()
            self._store.ask(self, request)

    def reply(self, reply: Reply) -> None:
        if self._timer:
            self._timer.cancel()
        self._slot = None
        try:
            sealed = self._channel.seal(_encode(reply))
        except ValueError as error:  # it asked for more than a message holds
            sealed = self._channel.seal(_encode(Reply(error=str(error))))
        self._transport.write(sealed)

    def push(self, value: Any) -> None:
        """What it has subscribed for."""
        self._transport.write(self._channel.seal(_encode(Reply(value, pushed=True))))

    def wait(self, slot: tuple[str, ...], timeout_s: float) -> None:
        """Let the client wait for what is not there yet, at most timeout_s after it has asked."""
        self._slot = slot
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._since + timeout_s, self._time_out)

    def _time_out(self) -> None:
        self._store.forget(self, self._slot)
        self.reply(Reply(error=TIMED_OUT))

    # ---- closing ------------------------------------------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        self._closed()

    def _closed(self) -> None:
        self._timer.cancel()
        self._store.unauthenticated.pop(self, None)
        self._store.authenticated.discard(self)
        if self._slot:
            self._store.forget(self, self._slot)
            self._slot = None
        will, self._disconnect_key = self._disconnect_key, ""
        self._store.part(self, will)


# ---- the process --------------------------------------------------------------------------------------------------------


def start(host: str, key: bytes, timeout_s: float = START_S) -> tuple[subprocess.Popen, Address]:
    """Start the store's process on this machine. It lives as long as the calling thread and the returned handle.

    host: how other ranks reach this machine. Raises what `launch` raises.
    """
    return launch("pipeline.store.server", host, {"key": key.hex()}, timeout_s)


def launch(module: str, host: str, told: dict[str, Any], timeout_s: float) -> tuple[subprocess.Popen, Address]:
    """Start any module that takes what it needs from its input as this one does, and wait until it listens.

    Raises RuntimeError if it ends before, TimeoutError if it has not come so far after timeout_s.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        text=True,
    )
    process.stdin.write(json.dumps({"parent": os.getpid(), "address": host, **told}) + "\n")
    process.stdin.flush()
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        process.kill()
        process.communicate()
        raise TimeoutError(f"the process of {module} does not listen after {timeout_s:g} s")
    port = process.stdout.readline()
    if not port:
        raise RuntimeError(f"the process of {module} has ended with status {process.wait()} before it listened")
    return process, Address(host, int(port))


def _listen(address: str) -> socket.socket:
    """On a fresh port of every interface, since a node has many names; but of loopback only if that is where ranks look."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, 0), family=family, backlog=QUEUED)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=QUEUED)
    return socket.create_server(("", 0), backlog=QUEUED)


def _end_with(parent: int) -> None:
    """End when the rank that started this does, and not before: Slurm sends its signals to all processes, and rank 0 may then
    want to save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    linux.die_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    linux.raise_open_files()  # a rank has three connections


async def serve(store: Server, address: str) -> None:
    """Until the input ends, and nobody needs it."""
    loop, listener = asyncio.get_running_loop(), _listen(address)
    loop.set_exception_handler(store.fail)
    server = await loop.create_server(lambda: Connection(store), sock=listener, backlog=ACCEPTED)
    listener.listen(QUEUED)  # asyncio has told the kernel ACCEPTED, which it accepts in one turn
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await ended.wait()
        await store.drain()


def read_parameters() -> dict[str, Any]:
    """What the process that started this one has to say; this one ends with it."""
    told = json.loads(sys.stdin.readline())
    _end_with(told["parent"])
    return told


def main() -> None:
    rank_log.log_to_stderr()
    told = read_parameters()
    asyncio.run(serve(StoreServer(bytes.fromhex(told["key"])), told["address"]))


if __name__ == "__main__":
    main()
