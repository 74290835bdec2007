"""A man in the middle between a client and a server of the store, who changes one message."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.store import auth
from pipeline.store.child_process import Address

BOUND_S = 30.0  # seconds that a connection may be silent
LINGER = struct.pack("ii", 1, 0)  # closing resets the connection
UP, DOWN = "to the server", "to the client"


@dataclass(frozen=True)
class Case:
    number: int
    seed: str
    way: str
    direction: str
    message: int  # the first ones belong to the handshake
    action: str

    @property
    def harmless(self) -> bool:
        return self.action in ("nothing", "dribble", "pause")


class Wire:
    """One connection between a client and a server's address, with the change of one of its messages."""

    def __init__(self, case: Case | None, near: socket.socket, address: Address, heard: RecordedMessages):
        self.case, self.heard = case, heard
        self.chance = random.Random(case.seed if case else 0)
        self.ends = {UP: near, DOWN: socket.create_connection(address)}  # by direction of the sender
        for end in self.ends.values():
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffers = {UP: bytearray(), DOWN: bytearray()}
        self.counts = {UP: 0, DOWN: 0}
        self.held = {UP: b"", DOWN: b""}
        self.stalled: set[str] = set()
        self.sent: list[tuple[str, bytes]] = []

    def run(self) -> None:
        """Forward all data until both ends are closed."""
        open_ends = {end: direction for direction, end in self.ends.items()}
        with contextlib.suppress(OSError, ValueError):  # the latter for a socket that was closed meanwhile
            while open_ends:
                ready, _, _ = select.select(list(open_ends), [], [], BOUND_S)
                if not ready:
                    break
                for end in ready:
                    direction = open_ends[end]
                    if data := end.recv(1 << 16):
                        self.buffers[direction] += data
                        self._split(direction)
                    else:
                        self.send(direction, bytes(self.buffers[direction]))
                        self.ends[_other(direction)].shutdown(socket.SHUT_WR)
                        del open_ends[end]
        self.close()

    def close(self, reset: bool = False) -> None:
        for end in self.ends.values():
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
                end.close()

    def send(self, direction: str, data: bytes) -> None:
        if direction not in self.stalled:
            self.ends[_other(direction)].sendall(data)

    def _split(self, direction: str) -> None:
        buffer = self.buffers[direction]
        while size := self._size(direction, buffer):
            message = bytes(buffer[:size])
            del buffer[:size]
            number = self.counts[direction]
            self.counts[direction] += 1
            if self.case and (direction, number) == (self.case.direction, self.case.message):
                ACTIONS[self.case.action](self, direction, message)
            else:
                self.send(direction, message + self.held[direction])
                self.held[direction] = b""
            self.sent.append((direction, message))
            self.heard.add(direction, number, message)

    def _size(self, direction: str, buffer: bytearray) -> int:
        """Return the number of bytes of the next message; 0 if it is incomplete."""
        opening = {UP: (auth.ANSWER,), DOWN: (auth.CHALLENGE, auth.MAC)}[direction]
        number = self.counts[direction]
        if number < len(opening):
            size = opening[number]
        elif len(buffer) < auth.HEADER:
            return 0
        else:
            size = auth.HEADER + auth.LENGTH.unpack_from(buffer)[0]
        return size if len(buffer) >= size else 0


class RecordedMessages:
    """Messages of earlier connections, by direction and place."""

    def __init__(self) -> None:
        self._messages: dict[tuple[str, int], bytes] = {}

    def add(self, direction: str, number: int, message: bytes) -> None:
        self._messages.setdefault((direction, number), message)

    def of(self, direction: str, number: int) -> bytes:
        return self._messages.get((direction, number), b"never heard")


def _other(direction: str) -> str:
    return DOWN if direction == UP else UP


def _nothing(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, message)


def _dribble(wire: Wire, direction: str, message: bytes) -> None:
    for at in range(min(200, len(message))):
        wire.send(direction, message[at : at + 1])
    wire.send(direction, message[200:])


def _pause(wire: Wire, direction: str, message: bytes) -> None:
    at = wire.chance.randrange(len(message))
    wire.send(direction, message[:at])
    time.sleep(0.05)
    wire.send(direction, message[at:])


def _flip(wire: Wire, direction: str, message: bytes) -> None:
    altered = bytearray(message)
    altered[wire.chance.randrange(len(message))] ^= 1 << wire.chance.randrange(8)
    wire.send(direction, bytes(altered))


def _noise(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, wire.chance.randbytes(len(message)))


def _zeros(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, bytes(len(message)))


def _insert(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, wire.chance.randbytes(wire.chance.choice((1, 4, 36, 5000))) + message)


def _append(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, message + wire.chance.randbytes(wire.chance.choice((1, 4, 36, 5000))))


def _megabyte(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, wire.chance.randbytes(1 << 20))


def _cut(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, message[: wire.chance.randrange(len(message))])
    wire.close()


def _reset(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, message[: wire.chance.randrange(len(message))])
    wire.close(reset=True)


def _stall(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, message[: wire.chance.randrange(len(message))])
    wire.stalled.add(direction)


def _length(wire: Wire, direction: str, message: bytes) -> None:
    own = len(message) - auth.HEADER
    length = wire.chance.choice(
        (0, 1, abs(own - 1), abs(own + 1), abs(own) + 100, auth.MAX_MESSAGE, auth.MAX_MESSAGE + 1, (1 << 32) - 1)
    )
    wire.send(direction, auth.LENGTH.pack(length) + message[auth.LENGTH.size :])


def _twice(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(direction, message + message)


def _skip(wire: Wire, direction: str, message: bytes) -> None:
    pass


def _swap(wire: Wire, direction: str, message: bytes) -> None:
    wire.held[direction] = message  # goes out after the next message


def _reflect(wire: Wire, direction: str, message: bytes) -> None:
    wire.send(_other(direction), message)


def _repeat(wire: Wire, direction: str, message: bytes) -> None:
    """Repeat one of this connection's earlier messages."""
    earlier = [data for way, data in wire.sent if way == direction] or [message]
    wire.send(direction, message + wire.chance.choice(earlier))


def _replay(wire: Wire, direction: str, message: bytes) -> None:
    """Replace it by the message at the same place of another connection."""
    wire.send(direction, wire.heard.of(direction, wire.counts[direction] - 1))


def _other_place(wire: Wire, direction: str, message: bytes) -> None:
    """Replace it by a message of another place, perhaps of the other direction."""
    wire.send(direction, wire.heard.of(wire.chance.choice((UP, DOWN)), wire.chance.randrange(6)))


ACTIONS: dict[str, Callable[[Wire, str, bytes], None]] = {
    name.strip("_").replace("_", " "): action
    for name, action in list(globals().items())
    if name.startswith("_") and getattr(action, "__annotations__", {}).get("wire") == "Wire"
}


@contextlib.contextmanager
def attacked(case: Case, address: Address, heard: RecordedMessages) -> Iterator[Address]:
    """Yield an address that forwards to `address` through the attacker, who changes the first connection alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    wires: list[Wire] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                wires.append(Wire(None if wires else case, near, address, heard))
                threading.Thread(target=wires[-1].run, daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield Address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(BOUND_S)
        for wire in wires:
            wire.close()
