"""A stream of bytes over an authenticated connection, for the messages between an engine's rank and an environment rank."""

from __future__ import annotations

import contextlib
import io
import socket
from typing import BinaryIO

from typing_extensions import override

from pipeline.store.auth import HEADER, AuthenticationError, Channel, receive

PIECE = 1 << 20
"""Most bytes of a sealed message of the stream."""


class SealedStream(io.RawIOBase):
    """Bytes in both directions, each piece with an HMAC. One thread may read while another writes.

    The end that started a process ends the stream by `finish`, with a text for the other end.
    """

    def __init__(self, connection: socket.socket, channel: Channel) -> None:
        self._connection, self._channel = connection, channel
        connection.settimeout(None)
        self._piece = memoryview(b"")
        self.last_words = ""
        """The text of the other end's `finish`; "" before it, or if the connection was lost."""

    def sendall(self, content: bytes) -> None:
        """Send bytes. Raises OSError if the connection is lost."""
        for begin in range(0, len(content), PIECE):
            self._connection.sendall(self._channel.seal(content[begin : begin + PIECE]))

    def finish(self, text: str) -> None:
        """End the stream from this end. The other end gets `text`, if it still reads."""
        with contextlib.suppress(OSError):
            self._connection.sendall(self._channel.seal(b"") + self._channel.seal(text.encode()))

    def receive(self) -> bytes:
        """Wait for the next piece and return it; b"" at the end of the stream, or if the connection is lost."""
        try:
            if not (piece := self._next()):
                self.last_words = self._next().decode()
            return piece
        except (OSError, AuthenticationError):
            return b""

    def _next(self) -> bytes:
        header = receive(self._connection, HEADER)
        return self._channel.verify(header, receive(self._connection, Channel.length(header)))

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]  # the stub's Buffer has no slices
        if not self._piece:
            self._piece = memoryview(self.receive())
        count = min(len(self._piece), len(buffer))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def makefile(self, mode: str) -> BinaryIO:
        """Return a buffered file of the received bytes, as a socket's `makefile` does. mode: "rb"."""
        assert mode == "rb"
        return io.BufferedReader(self)

    def shutdown(self, how: int) -> None:
        """Close the connection in both directions, as a socket's `shutdown` does. A read in progress ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(how)
