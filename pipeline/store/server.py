"""Run the store's server process beside rank 0, `python -m pipeline.store.server`. It ends with rank 0, see `child_process.py`.

It holds keys and queues (`table.py`), which torch uses too, and routes verbs and replies (`messaging.py`). In large worlds each
node has a relay (`relay.py`), which connects to the server on behalf of its ranks.

A client must authenticate within AUTH_TIMEOUT_S (`auth.py`) before the server reads anything else from it. At most
MAX_UNAUTHENTICATED connections, and at most half of the process's file descriptors, may be unauthenticated. Above that, a new
connection closes the oldest of them, whose client may connect again. One thread handles all requests, so that they have an
order. The process does not import torch and starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import sys
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from typing_extensions import override

from pipeline.files import rank_log
from pipeline.store import auth, messaging
from pipeline.store.child_process import read_parameters
from pipeline.store.table import ANY, EMPTY, TIMED_OUT, Missing, OnDisconnect, Pop, Reply, Set, StoreRequest, Table

logger = logging.getLogger("pipeline.store.server")  # `__name__` is `__main__` in this process

MAX_UNAUTHENTICATED = 2048
ACCEPTED = 16
"""Connections accepted in a turn of the event loop. They are few, so that ranks are served between turns, and closing
connections hold few file descriptors."""
SPARE = 128
"""File descriptors reserved for closing connections and for the process itself."""
QUEUED = 4096
"""Connections that the kernel queues, because thousands of ranks may connect at once."""
MAX_LOGGED = 20  # refusals, and errors, that are logged

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ANY | messaging.ANY).decode


class Server(ABC):
    """The base of a store and of a relay: limits unauthenticated connections and logs refused ones."""

    def __init__(self, key: bytes):
        self.key = key
        self.unauthenticated: dict[Connection, None] = {}  # oldest first
        self.authenticated: set[Connection] = set()
        self._logged: set[tuple[str, str]] = set()
        self._errors: set[str] = set()

    def admit(self, connection: Connection) -> None:
        """Add a connection that has not authenticated, and close the oldest such connections if there are too many."""
        self.unauthenticated[connection] = None
        while len(self.unauthenticated) > self._max_unauthenticated():
            next(iter(self.unauthenticated)).drop("too many unauthenticated connections")

    def _max_unauthenticated(self) -> int:
        """Return how many unauthenticated connections may be open."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(MAX_UNAUTHENTICATED, files // 2, files - len(self.authenticated) - SPARE))

    def log_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that asyncio has caught, once, and at most MAX_LOGGED errors: foreign clients can cause many."""
        message = f"{context['message']}: {context.get('exception')!r}"
        if message not in self._errors and len(self._errors) < MAX_LOGGED:
            self._errors.add(message)
            loop.default_exception_handler(context)

    def log_refusal(self, host: str, reason: str) -> None:
        """Log a refusal once for each host and reason, and at most MAX_LOGGED refusals: clients must not fill the disk."""
        if (host, reason) in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add((host, reason))
        note = "; further refusals are not logged" if len(self._logged) == MAX_LOGGED else ""
        logger.warning("refused a connection from %s: %s%s", host, reason, note)

    @abstractmethod
    def receive(self, connection: Connection, request: messaging.OneWay) -> None:
        """Handle a request without a reply."""

    @abstractmethod
    def handle(self, connection: Connection, request: StoreRequest) -> None:
        """Reply to a request, at once or when its value exists."""

    @abstractmethod
    def handle_disconnect(self, connection: Connection, key: str) -> None:
        """Handle the end of an authenticated connection. key: its disconnect key, which must be set now; empty: none."""

    def stop_waiting(self, connection: Connection, slot: tuple[str, ...]) -> None:  # noqa: B027 no request waits in a relay
        """Drop the request of a connection that waits for `slot`."""

    def change_disconnect_key(self, old_key: str, new_key: str) -> None:  # noqa: B027 only a relay needs it
        """Record the key that must be set when a connection ends; empty: none."""

    async def drain(self) -> None:  # noqa: B027 a store ends at once
        """Wait, after stdin has closed, until no rank needs this process."""


class StoreServer(Server):
    """The store of rank 0: keys and queues, messages, and waiting requests."""

    def __init__(self, key: bytes):
        super().__init__(key)
        self.table = Table()
        self._router, self._calls = messaging.Router(), messaging.PendingCalls()
        self._waiting: dict[tuple[str, ...], dict[Connection, StoreRequest]] = {}  # in order of arrival

    @override
    def receive(self, connection: Connection, request: messaging.OneWay) -> None:
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
            self.resume(("answers",))

    @override
    def handle(self, connection: Connection, request: StoreRequest) -> None:
        try:
            if isinstance(request, messaging.Collect | messaging.Unanswered):
                value = self._calls.apply(request)
            else:
                value = self.table.apply(request)
        except Missing as missing:
            if isinstance(request, Pop) and request.timeout_s == 0:
                connection.reply(Reply(error=EMPTY))
            else:
                self._waiting.setdefault(missing.slot, {})[connection] = request
                connection.wait(missing.slot, getattr(request, "timeout_s", 0.0))
            return
        except ValueError as error:  # the connection stays usable
            connection.reply(Reply(error=str(error)))
            return
        connection.reply(Reply(value))
        for slot in self.table.filled_slots(request):
            self.resume(slot)

    def resume(self, slot: tuple[str, ...]) -> None:
        """Handle again the requests that wait for `slot`."""
        for connection, request in self._waiting.pop(slot, {}).items():
            self.handle(connection, request)

    @override
    def stop_waiting(self, connection: Connection, slot: tuple[str, ...]) -> None:
        waiting = self._waiting.get(slot, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(slot, None)

    @override
    def handle_disconnect(self, connection: Connection, key: str) -> None:
        self._router.leave(connection)
        if key:
            self.table.apply(Set(key, b""))
            self.resume(("key", key))


class Connection(asyncio.Protocol):
    """A client of a store or a relay: authenticates it, then decodes its requests."""

    def __init__(self, store: Server):
        self._store = store
        self._buffer = bytearray()
        self._channel: auth.Channel | None = None
        self._disconnect_key = ""
        self._slot: tuple[str, ...] | None = None  # the slot for which its request waits
        self._request_time = 0.0  # of the current request, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    # ---- opening ------------------------------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._host = (transport.get_extra_info("peername") or ("?",))[0]
        self._challenge = auth.challenge()
        self._timer = asyncio.get_running_loop().call_later(auth.AUTH_TIMEOUT_S, self.drop, "it did not authenticate in time")
        self._store.admit(self)
        transport.write(self._challenge)

    def refuse(self, reason: str) -> None:
        """Close the connection and tell the client not to try again."""
        self._transport.write(auth.REFUSED)
        self.drop(reason)

    def drop(self, reason: str) -> None:
        """Close the connection. A client that knows the key tries again."""
        self._store.log_refusal(self._host, reason)
        self._transport.close()
        self._handle_close()

    def _authenticate(self) -> None:
        if len(self._buffer) < auth.ANSWER:
            return
        reply, self._channel = auth.accept(self._store.key, self._challenge, bytes(self._buffer[: auth.ANSWER]))
        del self._buffer[: auth.ANSWER]
        self._cancel_timer()
        self._store.unauthenticated.pop(self, None)
        self._store.authenticated.add(self)
        self._transport.write(reply)

    # ---- requests -----------------------------------------------------------------------------------------------------------

    @override
    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._buffer += data
        try:
            if not self._channel:
                self._authenticate()
            while self._channel and (message := auth.next_message(self._channel, self._buffer)) is not None:
                self._handle(_decode(message))
                if self._transport.is_closing():  # asyncio would log each further reply
                    return
        except (auth.AuthenticationError, msgspec.DecodeError) as error:
            self.refuse(str(error))

    def _handle(self, request: StoreRequest) -> None:
        if isinstance(request, messaging.OneWay):
            self._store.receive(self, request)
        elif isinstance(request, OnDisconnect):
            self._store.change_disconnect_key(self._disconnect_key, request.key)
            self._disconnect_key = request.key
            self.reply(Reply())
        else:
            self._request_time = asyncio.get_running_loop().time()
            self._store.handle(self, request)

    def reply(self, reply: Reply) -> None:
        """Send the reply to the current request."""
        self._cancel_timer()
        self._slot = None
        try:
            sealed = self._seal(reply)
        except ValueError as error:  # the reply exceeds MAX_MESSAGE
            sealed = self._seal(Reply(error=str(error)))
        self._transport.write(sealed)

    def _seal(self, reply: Reply) -> bytes:
        assert self._channel is not None  # requests follow authentication
        return self._channel.seal(_encode(reply))

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()

    def push(self, value: Any) -> None:
        """Send a message to which the client has subscribed."""
        self._transport.write(self._seal(Reply(value, pushed=True)))

    def wait(self, slot: tuple[str, ...], timeout_s: float) -> None:
        """Let the client wait for `slot`, at most timeout_s after its request."""
        self._slot = slot
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_at(self._request_time + timeout_s, self._time_out)

    def _time_out(self) -> None:
        if self._slot:
            self._store.stop_waiting(self, self._slot)
        self.reply(Reply(error=TIMED_OUT))

    # ---- closing ------------------------------------------------------------------------------------------------------------

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._handle_close()

    def _handle_close(self) -> None:
        self._cancel_timer()
        self._store.unauthenticated.pop(self, None)
        self._store.authenticated.discard(self)
        if self._slot:
            self._store.stop_waiting(self, self._slot)
            self._slot = None
        key, self._disconnect_key = self._disconnect_key, ""
        self._store.handle_disconnect(self, key)


# ---- the process --------------------------------------------------------------------------------------------------------


def _listen(address: str) -> socket.socket:
    """Return a socket on a free port: of loopback if `address` is a loopback address, else of every interface."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, 0), family=family, backlog=QUEUED)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=QUEUED)
    return socket.create_server(("", 0), backlog=QUEUED)


async def serve(store: Server, address: str) -> None:
    """Serve until stdin closes and no rank needs the process."""
    loop, listener = asyncio.get_running_loop(), _listen(address)
    loop.set_exception_handler(store.log_error)
    server = await loop.create_server(lambda: Connection(store), sock=listener, backlog=ACCEPTED)
    listener.listen(QUEUED)  # asyncio has set the kernel's queue to ACCEPTED
    stdin_closed = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), stdin_closed.set)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await stdin_closed.wait()
        await store.drain()


def main() -> None:
    """Run the store's process."""
    rank_log.log_to_stderr()
    parameters = read_parameters()
    asyncio.run(serve(StoreServer(bytes.fromhex(parameters["key"])), parameters["address"]))


if __name__ == "__main__":
    main()
