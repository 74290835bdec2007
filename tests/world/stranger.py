"""Attack the ports of gloo with a client that speaks gloo's protocol and lacks the attempt's key.

It finds the sockets on which ranks listen, connects to each under the number of each first rank, and answers every request.
`python -m tests.world.stranger [JOINS]` makes a world of seven ranks join repeatedly with one such client at its ports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import selectors
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.world.worlds import SIZE, World

SEQUENCE = struct.Struct("<q")  # what gloo expects first of a new connection
GUESSES = range(8)
PREAMBLE = struct.Struct("<6Q")  # bytes in all, operation, slot, offset, bytes that follow, offset there
SEND, READY = 1, 3  # an offer of data; a request for data
LISTENS = "0A"  # proc(5), /proc/net/tcp
NAMED = re.compile(r"rank \d \(\w+\) did not authenticate to rank \d \(\w+\) in a gloo group of \d ranks: ")


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return the IPv4 addresses and ports at which processes listen, read from /proc/net/tcp as any local user can."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{number}")))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENS and fields[9] in inodes:
            address, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def shout(size: int) -> bytes:
    return b"S" * size


@dataclass(frozen=True)
class Pickled:
    """Answers like the source of `broadcast_object_list`: a length, then a pickle that creates a file when it is loaded."""

    file: Path

    def __reduce__(self):
        return Path.touch, (self.file,)

    def __call__(self, size: int) -> bytes:
        said = pickle.dumps(self)
        return said if size == len(said) else SEQUENCE.pack(len(said)).ljust(size, b"S")


class Stranger:
    """A client that attacks gloo's ports in a thread until `leave`."""

    def __init__(self, pids: Iterable[int], say: Callable[[int], bytes] = shout):
        """pids: processes whose listening sockets are left alone.

        say: returns the answer to a request for that many bytes, or None.
        """
        self.tried = 0  # places
        self.bound: set[str] = set()  # addresses at which ranks listen
        self._pids, self._say = list(pids), say
        self._taken: set[socket.socket] = set()
        self._left = threading.Event()
        self._seen = listening(self._pids)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def taken(self) -> int:
        """Return the places in which a rank has sent it data."""
        return len(self._taken)

    def leave(self) -> None:
        self._left.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._left.is_set():
            for address in listening(self._pids) - self._seen:
                self._seen.add(address)
                self.bound.add(address[0])
                for guess in GUESSES:
                    self._visit(address, guess)
            for key, _ in self._selector.select(0.002):
                self._hear(key.fileobj, key.data)

    def _visit(self, address: tuple[str, int], guess: int) -> None:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=5)
            connection.sendall(SEQUENCE.pack(guess))
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, bytearray())
            self.tried += 1

    def _hear(self, connection: socket.socket, heard: bytearray) -> None:
        try:
            if not (more := connection.recv(1 << 16)):
                raise ConnectionResetError
            self._taken.add(connection)
            heard += more
            while len(heard) >= PREAMBLE.size:
                _, operation, slot, _, size, _ = PREAMBLE.unpack_from(heard)
                del heard[: PREAMBLE.size]
                if operation == READY and (said := self._say(size)):
                    connection.sendall(PREAMBLE.pack(PREAMBLE.size + len(said), SEND, slot, 0, len(said), 0) + said)
        except OSError:
            self._selector.unregister(connection)
            connection.close()


# ---- many joins -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """The result of a join with a stranger at its ports."""

    end: str  # how it ended
    tried: int  # places
    taken: int  # places in which a rank has sent the stranger data
    foreign: int  # stranger's bytes that ranks accepted as another rank's
    bound: set[str]  # the addresses at which ranks listened


def visited(world: World, say: Callable[[int], bytes] = shout) -> Join:
    """Run a stranger at a world's ports until its ranks end.

    With HELD, rank 3 joins once the stranger has connected to all other ranks.
    """
    stranger = Stranger([process.pid for process in world.processes], say)
    (world.run_dir / "visited").touch()
    try:
        while "HELD" in os.environ and stranger.tried < (SIZE - 1) * len(GUESSES):
            time.sleep(0.01)
        (world.run_dir / "entered").touch()
        statuses = world.wait()
    finally:
        stranger.leave()
    foreign = sum(int(count) for rank in range(SIZE) for count in re.findall(r"foreign bytes: (\d+)", world.log(rank)))
    end = "went on" if statuses == [0] * SIZE else " ".join(map(world.failure().get, ("message", "traceback")))
    return Join(end, stranger.tried, stranger.taken, foreign, stranger.bound)


def main(joins: int) -> None:
    os.environ |= {"JOIN_S": "20"}
    for when in ("with the others", "when the stranger has been at all other ports"):
        if when != "with the others":
            os.environ["HELD"] = "1"
        ends, total = Counter(), Counter()
        for _ in range(joins // 2):
            with tempfile.TemporaryDirectory() as folder:
                world = World(Path(folder) / "run", "visited joined")
                try:
                    join = visited(world)
                finally:
                    world.end()
            ends["end with an error that names both ranks" if NAMED.search(join.end) else join.end] += 1
            total.update(tried=join.tried, taken=join.taken, foreign=join.foreign)
        print(f"rank 3 joins {when}: {joins // 2} joins, {total['tried']} places tried,")
        print(f"    {total['taken']} in which gloo spoke with the stranger, {total['foreign']} bytes of it taken for a rank's")
        for end, count in ends.most_common():
            print(f"    {count}: {end}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
