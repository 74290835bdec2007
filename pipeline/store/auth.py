"""Authenticate both ends of a connection by the attempt's key, and protect each message after that by an HMAC.

    server -> client    GREETING, server's nonce
    client -> server    client's nonce, HMAC(key, "client", both nonces)
    server -> client    HMAC(key, "server", both nonces), or REFUSED
then both ways messages: length, HMAC(the connection's key for this direction, the message's number, message), message.

Each end contributes a nonce, so a handshake is valid for one connection. Messages are numbered, so a repeated, dropped,
reordered or forged message fails verification. All HMACs are HMAC-SHA256 (RFC 2104).
Messages are not secret: an eavesdropper on the network can read them, but not the key.
"""

from __future__ import annotations

import hmac
import os
import random
import socket
import stat
import struct
import time
from pathlib import Path

from pipeline.files.storage import listed, open_own

GREETING = b"hetstep store 1\n"
NONCE = 32
MAC = 32
CHALLENGE = len(GREETING) + NONCE  # bytes of the server's first message
ANSWER = NONCE + MAC  # bytes of the client's reply
REFUSED = bytes(MAC)
MAX_MESSAGE = 8 << 20  # bytes
AUTH_TIMEOUT_S = 10.0  # for the whole handshake

LENGTH = struct.Struct(">I")
HEADER = LENGTH.size + MAC
NUMBER = struct.Struct(">Q")


class AuthenticationError(Exception):
    """Raised when the other end does not know the key, or its bytes were altered on the way."""


class Refused(PermissionError):
    """Raised when the server refused the key. Other PermissionErrors can have other causes, such as a full packet filter."""


def attempt_key(run_dir: Path, attempt: str, wait_s: float = 10.0) -> bytes:
    """Return the key of an attempt, derived from the run's secret. Ranks of earlier attempts have other keys.

    Waits `wait_s` for a shared file system to show the secret, then raises FileNotFoundError. Raises PermissionError if other
    users may read the file, or if it is a link or belongs to another user, and ValueError if it is not 32 bytes in hex.
    """
    path = run_dir / ".secret"
    deadline = time.monotonic() + wait_s
    while not listed(path):
        if time.monotonic() > deadline:
            raise FileNotFoundError(f"there is no {path}, the secret by which ranks authenticate. Try to submit the run again")
        time.sleep(0.1)
    with open(open_own(path, os.O_RDONLY)) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise PermissionError(
                f"others may read {path} (mode {mode:04o}) and join this run. Try to delete it and submit again"
            )
        secret = bytes.fromhex(file.read(1000).strip())
    if len(secret) != 32:
        raise ValueError(f"{path}: got {len(secret)} bytes; expected 32. Try to delete it and submit again")
    return keyed_hmac(secret, b"attempt", attempt.encode())


def keyed_hmac(key: bytes, label: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of a label and a content."""
    return hmac.digest(key, label + b"\0" + content, "sha256")


class Channel:
    """The message keys and counters of an authenticated connection."""

    def __init__(self, send_key: bytes, receive_key: bytes):
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = self._received = 0

    def seal(self, message: bytes) -> bytes:
        """Return the message with its header. Raises ValueError above MAX_MESSAGE bytes."""
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes; the store takes at most {MAX_MESSAGE}")
        tag = hmac.digest(self._send_key, NUMBER.pack(self._sent) + message, "sha256")
        self._sent += 1
        return LENGTH.pack(len(message)) + tag + message

    @staticmethod
    def length(header: bytes) -> int:
        """Return the number of bytes of the message after this header. Raises AuthenticationError above MAX_MESSAGE."""
        (length,) = LENGTH.unpack_from(header)
        if length > MAX_MESSAGE:
            raise AuthenticationError(f"it announced a message of {length} bytes")
        return length

    def verify(self, header: bytes, message: bytes) -> bytes:
        """Return the message. Raises AuthenticationError if its HMAC is wrong."""
        expected = hmac.digest(self._receive_key, NUMBER.pack(self._received) + message, "sha256")
        if not hmac.compare_digest(header[LENGTH.size :], expected):
            raise AuthenticationError("a message was altered, or does not come from the client that opened the connection")
        self._received += 1
        return message


def next_message(channel: Channel, buffer: bytearray) -> bytes | None:
    """Remove the first whole message from `buffer` and return it; None if there is none yet. Raises AuthenticationError."""
    if len(buffer) < HEADER:
        return None
    header = bytes(buffer[:HEADER])
    end = HEADER + Channel.length(header)
    if len(buffer) < end:
        return None
    message = bytes(buffer[HEADER:end])
    del buffer[:end]
    return channel.verify(header, message)


def challenge() -> bytes:
    """Return the first message of a server: greeting and nonce."""
    return GREETING + os.urandom(NONCE)


def answer(key: bytes, challenge: bytes) -> bytes:
    """Return the client's reply to a challenge. Raises AuthenticationError if the greeting is wrong."""
    if not challenge.startswith(GREETING):
        raise AuthenticationError("the server at this address is not the store of a run")
    nonce = os.urandom(NONCE)
    return nonce + keyed_hmac(key, b"client", challenge + nonce)


def accept(key: bytes, challenge: bytes, answer: bytes) -> tuple[bytes, Channel]:
    """Return the server's proof and its end of the channel. Raises AuthenticationError if the client's HMAC is wrong."""
    nonce, proof = answer[:NONCE], answer[NONCE:]
    nonces = challenge + nonce
    if not hmac.compare_digest(proof, keyed_hmac(key, b"client", nonces)):
        raise AuthenticationError("it does not know this attempt's secret")
    channel = Channel(keyed_hmac(key, b"to client", nonces), keyed_hmac(key, b"to server", nonces))
    return keyed_hmac(key, b"server", nonces), channel


def open_channel(key: bytes, challenge: bytes, answer: bytes, proof: bytes) -> Channel:
    """Return the client's end of the channel. Raises AuthenticationError if the server's HMAC is wrong, and Refused."""
    if proof == REFUSED:
        raise Refused("the store of rank 0 refuses this rank: the rank has another secret, or belongs to another attempt")
    nonces = challenge + answer[:NONCE]
    if not hmac.compare_digest(proof, keyed_hmac(key, b"server", nonces)):
        raise AuthenticationError("the server at this address does not know this attempt's secret")
    return Channel(keyed_hmac(key, b"to server", nonces), keyed_hmac(key, b"to client", nonces))


# ---- a client's connection ------------------------------------------------------------------------------------------------


def connect(address: tuple[str, int], key: bytes, deadline: float) -> tuple[socket.socket, Channel]:
    """Connect to a server and authenticate both ends. Retry until time.monotonic() reaches `deadline`.

    Raises Refused if the server refuses the key, ConnectionError if the last try failed for another reason.
    """
    while True:
        connection, auth_deadline = None, time.monotonic() + AUTH_TIMEOUT_S
        try:
            connection = socket.create_connection(address, timeout=AUTH_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = receive(connection, CHALLENGE, auth_deadline)
            reply = answer(key, challenge)
            connection.sendall(reply)
            return connection, open_channel(key, challenge, reply, receive(connection, MAC, auth_deadline))
        except (OSError, AuthenticationError) as error:
            if connection:
                connection.close()
            if isinstance(error, Refused):
                raise
            if time.monotonic() > deadline:  # before it, the server may be busy, or have preferred newer connections
                raise ConnectionError(f"{address[0]}:{address[1]} cannot be reached: {error}") from error
            time.sleep(random.uniform(0.1, 0.3))  # spread clients that were closed at the same time


def receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Return the next `size` bytes. Raises ConnectionResetError if the other end closes, TimeoutError if it is too slow.

    deadline: time.monotonic() until which all bytes must arrive; None: the socket's timeout limits each piece.
    """
    data = bytearray(size)
    free = memoryview(data)
    while free:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(free)
        if not count:
            raise ConnectionResetError("the connection was closed")
        free = free[count:]
    return bytes(data)
