"""A rank's end of the store: torch.distributed.Store over a connection that is proven at both ends (`auth.py`).

torch calls it from C++ by name. `get`, `set` and so on mean what they mean to torch.distributed.TCPStore, and fail with the
same errors: DistStoreError when a wait is over, DistNetworkError when the store is gone, QueueEmptyError.
"""

from __future__ import annotations

import subprocess
import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from pipeline.store import auth, messaging, table
from pipeline.store.server import Address

REPLY_GRACE_S = 30.0  # beyond a request's own timeout, for a store that is busy
LONGEST_S = 1e6  # a socket knows no longer timeout
FOREVER_S = 3e7  # a year; the watchdog bounds such waits

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(table.Reply).decode
_decode_answers = msgspec.msgpack.Decoder(messaging.Collected).decode


class RunStore(dist.Store):
    """One connection. Threads take turns on it, so one that waits holds up the others: `clone` for those that wait long."""

    def __init__(self, address: Address, key: bytes, timeout_s: float, name: str = "the store of rank 0"):
        """timeout_s: of connecting, and of later waits that name none. name: what errors call the other end.

        Raises PermissionError if the store refuses the key, DistNetworkError if it is not reached.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._address = address
        self._key = key
        self._name = name
        self._turn = threading.Lock()
        self._clones: list[RunStore] = []  # torch holds only the C++ part of one that it asks for
        self.process: subprocess.Popen | None = None  # the store's, on the rank that has started it
        self.relay: Address | None = None  # this node's, if it has one
        self.relay_process: subprocess.Popen | None = None  # the relay's, on the rank that has started it
        try:
            self._socket, self._channel = auth.connect(address, key, time.monotonic() + timeout_s)
        except ConnectionError as error:
            raise dist.DistNetworkError(f"{name} at {error}") from error

    # ---- the connection -----------------------------------------------------------------------------------------------------

    def _speak(self, request: table.Request | None, replied: bool, timeout_s: float = 0.0) -> bytes:
        """Send a request, if there is one, and wait for a reply, if one follows."""
        message = _encode(request) if request else None
        with self._turn:
            sealed = self._channel.seal(message) if message else b""
            try:
                self._socket.settimeout(timeout_s + REPLY_GRACE_S if timeout_s < LONGEST_S else None)
                self._socket.sendall(sealed)
                if not replied:
                    return b""
                header = auth.receive(self._socket, auth.HEADER)
                return self._channel.verify(header, auth.receive(self._socket, self._channel.length(header)))
            except (OSError, auth.AuthenticationError) as error:
                self._socket.close()  # or the next would read this one's answer
                host, port = self._address
                raise dist.DistNetworkError(f"{self._name} at {host}:{port} is gone: {error}") from error
            except BaseException:
                self._socket.close()
                raise

    def _ask(self, request: table.Request, timeout_s: float = 0.0) -> Any:
        """timeout_s: how long the store itself may wait before it answers."""
        reply = _decode(self._speak(request, True, timeout_s))
        if reply.error == table.TIMED_OUT:
            what = getattr(request, "queue", None) or ", ".join(request.keys)
            raise dist.DistStoreError(f"the store has no {what} after {timeout_s:g} s")
        if reply.error == table.EMPTY:
            raise dist.QueueEmptyError(f"the queue {request.queue} is empty")
        if reply.error:
            raise dist.DistStoreError(f"{type(request).__name__}: {reply.error}")
        return reply.value

    def _seconds(self, timeout: timedelta | None = None) -> float:
        return (self.timeout if timeout is None else timeout).total_seconds()

    # ---- what torch knows ---------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(table.Set(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        timeout_s = self._seconds()
        values: list[bytes] = []
        while len(values) < len(keys):
            values += self._ask(table.Get(keys[len(values) :], timeout_s), timeout_s)
        return values

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._ask(table.MultiSet(keys, [_bytes(value) for value in values]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(table.Wait(keys, self._seconds(timeout)), self._seconds(timeout))

    def add(self, key: str, amount: int) -> int:
        return self._ask(table.Add(key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(table.Append(key, _bytes(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(table.CompareSet(key, _bytes(expected_value), _bytes(desired_value)))

    def check(self, keys: list[str]) -> bool:
        return self._ask(table.Check(keys))

    def delete_key(self, key: str) -> bool:
        return self._ask(table.Delete(key))

    def num_keys(self) -> int:
        return self._ask(table.Count())

    def list_keys(self) -> list[str]:
        return self._ask(table.List())

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(table.Push(key, _bytes(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        timeout_s = self._seconds() if block else 0.0
        return self._ask(table.Pop(key, timeout_s), timeout_s)

    def queue_len(self, key: str) -> int:
        return self._ask(table.Length(key))

    def has_extended_api(self) -> bool:
        return True

    def clone(self, timeout_s: float | None = None) -> RunStore:
        """Return another connection to the same store. timeout_s: the clone's; None: as this one's."""
        clone = RunStore(self._address, self._key, self._seconds() if timeout_s is None else timeout_s)
        self._clones.append(clone)
        return clone

    def nearest(self, node: str) -> RunStore:
        """Return a connection for mail and heartbeats: to the relay of this node, if it has one, else to the store itself."""
        if self.relay is None:
            return self.clone()
        near = RunStore(self.relay, self._key, self._seconds(), f"the relay of {node}")
        self._clones.append(near)
        return near

    deleteKey = delete_key  # by these names C++ asks for them
    getNumKeys = num_keys

    # ---- what only we use ---------------------------------------------------------------------------------------------------

    def exchange(self, key: str, value: bytes, keys: list[str]) -> list[bytes | None]:
        """Set `key` and look at `keys`, None for those that are not there. One request, which never waits."""
        return self._ask(table.Exchange({key: value}, keys))

    def addresses(self) -> tuple[str, str]:
        """Return (this end's, rank 0's) IP address of the connection."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def code(self, label: bytes, content: bytes) -> bytes:
        """Return a code that only who knows the attempt's key can make."""
        return auth.keyed_hmac(self._key, label, content)

    def set_on_disconnect(self, key: str) -> None:
        """The store sets `key` when this connection ends, by whatever cause. An empty key takes that back."""
        self._ask(table.OnDisconnect(key))

    # ---- mail (`messaging.py`) -----------------------------------------------------------------------------------------------

    def send(self, request: messaging.OneWay) -> None:
        """Something that is not replied to. On a connection that is asked nothing else, or from the thread that asks."""
        self._speak(request, False)

    def next_mail(self) -> list[bytes]:
        """Wait for mail that this connection has subscribed for. It is good for nothing else then."""
        return [message for _, _, message in _decode(self._speak(None, True, LONGEST_S)).value]

    def collect(self, block: bool) -> list[messaging.Answer]:
        """On rank 0: some answers, in the order in which they came. Without `block` there may be none."""
        timeout_s = FOREVER_S if block else 0.0
        return _decode_answers(self._speak(messaging.Collect(timeout_s), True, timeout_s)).value

    def unanswered(self, call: int) -> list[int]:
        return self._ask(messaging.Unanswered(call))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
