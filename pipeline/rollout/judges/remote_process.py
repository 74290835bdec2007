"""Processes of environments on environment ranks: their server there, and their end at an engine's rank.

An engine's rank connects to the server, which starts a process as `ParentProcess.spawn` does, and passes messages between the
two. Both ends prove that they know the attempt's secret, and each message has an HMAC (`store/auth.py`). The process ends with
the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from typing import Self

from typing_extensions import override

from pipeline.rollout.judges.parent_process import CLOSING_S, READ_S, ParentProcess
from pipeline.rollout.judges.sealed_stream import SealedStream
from pipeline.sandbox import linux
from pipeline.store import auth

logger = logging.getLogger(__name__)

MOST_UNKNOWN = 64
"""Maximum number of connections that have not proven yet that they know the secret. A newer one ends the oldest."""
RETRY_S = 0.1  # after a connection that could not be accepted
PIECE = 1 << 16  # bytes that are passed on at once
LOST = "was lost: the connection to its environment rank has ended"


class ProcessServer:
    """Starts a process of environments for each connection of an engine's rank."""

    def __init__(self, address: str, key: bytes) -> None:
        """Listen at an IP address, on a free port. key: the secret of both ends."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._key, self._socket = key, socket.create_server((address, 0), family=family, backlog=4096)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._unknown: deque[socket.socket] = deque()  # the oldest first
        self._open: set[threading.Thread] = set()
        self._closed = False
        linux.raise_open_files()  # each engine takes two
        threading.Thread(target=self._accept, name="environments' server", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections, and wait until the processes have closed their environments, within their limit."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + CLOSING_S
        for thread in list(self._open):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # out of descriptors
                self._pause(error)
                continue
            if len(self._unknown) >= MOST_UNKNOWN:
                with contextlib.suppress(IndexError, OSError):  # it has proven itself, or is gone
                    self._unknown.popleft().shutdown(socket.SHUT_RDWR)
            self._unknown.append(connection)
            try:
                threading.Thread(target=self._serve, args=[connection], name="environments", daemon=True).start()
            except RuntimeError as error:  # out of threads
                self._unknown.remove(connection)
                connection.close()
                self._pause(error)

    def _pause(self, error: Exception) -> None:
        if not self._closed:
            logger.warning("a connection of an engine is not accepted: %s", error)
            time.sleep(RETRY_S)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            channel = self._authenticate(connection)
            if channel is None:
                with contextlib.suppress(ValueError):
                    self._unknown.remove(connection)
            else:
                this = threading.current_thread()
                self._open.add(this)
                try:
                    _pass_on(SealedStream(connection, channel))
                finally:
                    self._open.discard(this)

    def _authenticate(self, connection: socket.socket) -> auth.Channel | None:
        """Return the channel to an engine's rank; None if the other end does not know the secret."""
        try:
            connection.settimeout(auth.AUTH_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = auth.challenge()
            connection.sendall(challenge)
            answer = auth.receive(connection, auth.ANSWER, time.monotonic() + auth.AUTH_TIMEOUT_S)
            try:
                proof, channel = auth.accept(self._key, challenge, answer)
            except auth.AuthenticationError:
                connection.sendall(auth.REFUSED)
                return None
            self._unknown.remove(connection)
            connection.sendall(proof)
            return channel
        except (OSError, ValueError):  # ValueError: `_accept` has ended it
            return None


def _pass_on(stream: SealedStream) -> None:
    """Start a process, which ends with this thread, and pass messages between it and the stream until one of them ends."""
    try:
        process = ParentProcess.spawn()
    except OSError as error:  # out of memory or processes
        stream.finish(f"could not be started on {os.uname().nodename}: {error}")
        return
    logger.info("process %d runs the environments of an engine", process.pid)
    connection = process.connection
    assert isinstance(connection, socket.socket)
    threading.Thread(target=_pass_commands, args=[stream, connection], name="commands", daemon=True).start()
    with contextlib.suppress(OSError):  # either end is gone
        while piece := connection.recv(PIECE):
            stream.sendall(piece)
    process.wait(READ_S)  # it may be about to end by itself
    stream.finish(f"{process.end()} on {os.uname().nodename}")
    connection.close()


def _pass_commands(stream: SealedStream, process: socket.socket) -> None:
    """Pass on what the engine's rank sends. When its connection ends, end the process's."""
    with contextlib.suppress(OSError):
        while piece := stream.receive():
            process.sendall(piece)
    with contextlib.suppress(OSError):
        process.shutdown(socket.SHUT_RDWR)


class RemoteProcess(ParentProcess):
    """A process of environments on an environment rank, as an engine's rank sees it."""

    def __init__(self, stream: SealedStream) -> None:
        super().__init__(0, stream)
        self._stream = stream

    @classmethod
    def start(cls, address: tuple[str, int], key: bytes, timeout_s: float) -> Self:
        """Start a process at a `ProcessServer`. Raises ConnectionError if it cannot be reached within `timeout_s`."""
        return cls(SealedStream(*auth.connect(address, key, time.monotonic() + timeout_s)))

    @override
    def _poll(self) -> int | None:
        return None if self._reader.is_alive() else 0

    @override
    def end(self) -> str:
        """End the process, if it runs, with its connection; return how it ended."""
        self._unsent.put(b"")
        self._stream.shutdown(socket.SHUT_RDWR)
        self._reader.join(READ_S)
        return self._stream.last_words or LOST
