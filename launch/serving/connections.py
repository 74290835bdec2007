"""Limit the connections of the service: the time for a request to arrive, and their number per address and in total.

A connection is waiting while no complete request has arrived on it. If there are too many connections, the oldest waiting one
is closed; if there are too many of one address, the oldest waiting one of that address. So a new connection never closes one
that has a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 1000
MAX_OF_ADDRESS = 200
ARRIVAL_S = 20.0
"""Seconds within which a complete request must arrive.

They count from the start of the connection, or from the end of the request before.
"""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with limits on connections. `bounded` makes a separate class for each service."""

    max_connections = MAX_CONNECTIONS
    max_of_address = MAX_OF_ADDRESS
    arrival_s = ARRIVAL_S
    waiting: dict[BoundedProtocol, None]  # the longest wait first
    of_address: Counter[str]

    _deadline: asyncio.TimerHandle | None = None

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.of_address[self._address] += 1
        self._wait()
        if self.of_address[self._address] > self.max_of_address:
            next(connection for connection in self.waiting if connection._address == self._address).end()
        elif len(self.connections) > self.max_connections:
            next(iter(self.waiting)).end()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.of_address -= Counter([self._address])
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        """Mark the connection as waiting, and start the deadline for its next request."""
        self._stop_waiting()
        self.waiting[self] = None
        self._deadline = self.loop.call_later(self.arrival_s, self.end)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def end(self) -> None:
        """Close the connection."""
        self._stop_waiting()
        self.transport.abort()  # `close` would wait for a client that takes nothing


def bounded(**bounds: float) -> type[BoundedProtocol]:
    """Return a protocol class for one service, with its own count of connections.

    bounds: values that replace those of `BoundedProtocol`.
    """
    return type("Protocol", (BoundedProtocol,), {**bounds, "waiting": {}, "of_address": Counter()})
