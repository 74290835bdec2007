"""A rank's connection to the store: a torch.distributed.Store whose two ends authenticate each other (`auth.py`).

torch calls it from C++ by name. `get`, `set` and so on have the semantics of torch.distributed.TCPStore and raise the same
errors: DistStoreError after a timeout, DistNetworkError when the store is gone, QueueEmptyError.
"""

from __future__ import annotations

import subprocess
import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed exports it without a stub
from typing_extensions import override

from pipeline.store import auth, messaging, table
from pipeline.store.child_process import Address

REPLY_GRACE_S = 30.0  # added to a request's own timeout, for a busy store
LONGEST_S = 1e6  # above this, a socket gets no timeout
FOREVER_S = 3e7  # a year: the watchdog bounds such waits

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(table.Reply).decode
_decode_replies = msgspec.msgpack.Decoder(messaging.Collected).decode


class RunStore(Store):
    """A connection to the store. Threads take turns on it, so a thread that waits long should use a `clone`."""

    def __init__(self, address: Address, key: bytes, timeout_s: float, name: str = "the store of rank 0"):
        """Connect and authenticate. name: what errors call the other end.

        timeout_s: of the connection attempt, and of later waits that state no timeout. Raises PermissionError if the store
        refuses the key, DistNetworkError if it cannot be reached.
        """
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._address = address
        self._key = key
        self._name = name
        self._turn = threading.Lock()
        self._clones: list[RunStore] = []  # torch keeps only the C++ part of a clone alive
        self.process: subprocess.Popen | None = None  # the server process, on the rank that started it
        self.relay: Address | None = None  # address of this node's relay, if it has one
        self.relay_process: subprocess.Popen | None = None  # the relay process, on the rank that started it
        try:
            self._socket, self._channel = auth.connect(address, key, time.monotonic() + timeout_s)
        except ConnectionError as error:
            raise dist.DistNetworkError(f"{name} at {error}") from error

    # ---- the connection -----------------------------------------------------------------------------------------------------

    def _round_trip(self, request: table.StoreRequest | None, replied: bool, timeout_s: float = 0.0) -> bytes:
        """Send a request, if there is one, and return the reply, if one follows."""
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
                self._socket.close()  # the next request would read this reply
                host, port = self._address
                raise dist.DistNetworkError(f"{self._name} at {host}:{port} is gone: {error}") from error
            except BaseException:
                self._socket.close()
                raise

    def _request(self, request: table.StoreRequest, timeout_s: float = 0.0) -> Any:
        """Send a request and return its value. timeout_s: how long the store itself may wait before it replies."""
        reply = _decode(self._round_trip(request, True, timeout_s))
        if reply.error == table.TIMED_OUT:
            slot = request.queue if isinstance(request, table.Pop) else ", ".join(getattr(request, "keys", ()))
            raise dist.DistStoreError(f"the store has no {slot} after {timeout_s:g} s")
        if reply.error == table.EMPTY and isinstance(request, table.Pop):
            raise dist.QueueEmptyError(f"the queue {request.queue} is empty")
        if reply.error:
            raise dist.DistStoreError(f"{type(request).__name__}: {reply.error}")
        return reply.value

    @property
    def timeout_s(self) -> float:
        """Seconds of the connection attempt, and of waits that state no timeout."""
        return self.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's stub

    def _seconds(self, timeout: timedelta | None = None) -> float:
        return self.timeout_s if timeout is None else timeout.total_seconds()

    # ---- torch.distributed.Store --------------------------------------------------------------------------------------------

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._request(table.Set(key, _bytes(value)))

    @override
    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    @override
    def multi_get(self, keys: list[str]) -> list[bytes]:
        timeout_s = self._seconds()
        values: list[bytes] = []
        while len(values) < len(keys):
            values += self._request(table.Get(keys[len(values) :], timeout_s), timeout_s)
        return values

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys in one request."""
        self._request(table.MultiSet(keys, [_bytes(value) for value in values]))

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._request(table.Wait(keys, self._seconds(timeout)), self._seconds(timeout))

    @override
    def add(self, key: str, amount: int) -> int:
        return self._request(table.Add(key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key. A key that does not exist counts as empty."""
        self._request(table.Append(key, _bytes(value)))

    @override
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._request(table.CompareSet(key, _bytes(expected_value), _bytes(desired_value)))

    @override
    def check(self, keys: list[str]) -> bool:
        return self._request(table.HasKeys(keys))

    @override
    def delete_key(self, key: str) -> bool:
        return self._request(table.Delete(key))

    @override
    def num_keys(self) -> int:
        return self._request(table.Count())

    @override
    def list_keys(self) -> list[str]:
        return self._request(table.List())

    @override
    def queue_push(self, key: str, value: str | bytes) -> None:
        self._request(table.Push(key, _bytes(value)))

    @override
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        timeout_s = self._seconds() if block else 0.0
        return self._request(table.Pop(key, timeout_s), timeout_s)

    @override
    def queue_len(self, key: str) -> int:
        return self._request(table.Length(key))

    def has_extended_api(self) -> bool:
        """Return True: torch may use `append`, `multi_get`, `multi_set` and queues."""
        return True

    def clone(self, timeout_s: float | None = None) -> RunStore:
        """Return another connection to the same store. timeout_s: of the clone; None: the same as here."""
        clone = RunStore(self._address, self._key, self.timeout_s if timeout_s is None else timeout_s)
        self._clones.append(clone)
        return clone

    def nearest(self, node: str) -> RunStore:
        """Return a connection for messages and heartbeats: to this node's relay if it has one, else to the store."""
        if self.relay is None:
            return self.clone()
        connection = RunStore(self.relay, self._key, self.timeout_s, f"the relay of {node}")
        self._clones.append(connection)
        return connection

    deleteKey = delete_key  # the names that C++ calls
    getNumKeys = num_keys

    # ---- additions ----------------------------------------------------------------------------------------------------------

    def exchange(self, key: str, value: bytes, keys: list[str]) -> list[bytes | None]:
        """Set `key` and return the values of `keys` without waiting. The value of a key that does not exist is None."""
        return self._request(table.Exchange({key: value}, keys))

    def addresses(self) -> tuple[str, str]:
        """Return (IP address of this end, IP address of rank 0's end) of the connection."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def code(self, label: bytes, content: bytes) -> bytes:
        """Return an HMAC of `label` and `content` with the attempt's key."""
        return auth.keyed_hmac(self._key, label, content)

    def set_on_disconnect(self, key: str) -> None:
        """Make the store set `key` when this connection ends. An empty key cancels this."""
        self._request(table.OnDisconnect(key))

    # ---- messages (`messaging.py`) -------------------------------------------------------------------------------------------

    def send(self, request: messaging.OneWay) -> None:
        """Send a request without a reply.

        Only one thread may send requests over a connection, or the connection must carry one-way requests alone.
        """
        self._round_trip(request, False)

    def next_messages(self) -> list[bytes]:
        """Wait for messages to which this connection has subscribed. The connection can then make no other request."""
        return [message for _, _, message in _decode(self._round_trip(None, True, LONGEST_S)).value]

    def collect(self, timeout_s: float = FOREVER_S) -> list[messaging.VerbReply]:
        """Return replies to verbs on rank 0, in order of arrival; [] if none arrives within the timeout."""
        return _decode_replies(self._round_trip(messaging.Collect(timeout_s), True, timeout_s)).value or []

    def silent_ranks(self, call: int) -> list[int]:
        """Return, on rank 0, the ranks that have not replied to the call with this number."""
        return self._request(messaging.Unanswered(call))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
