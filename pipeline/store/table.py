"""Store keys, values and queues, and define the requests on them. `server.py` has the connections.

The requests have the semantics of torch.distributed.TCPStore, because torch sends them. Only `Exchange` and `OnDisconnect` are
not among TCPStore's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

BATCH = 256 << 10  # bytes of values in one reply to Get; the client requests the rest

# ---- requests ---------------------------------------------------------------------------------------------------------


class StoreRequest(msgspec.Struct, array_like=True, tag=True):
    """A request to the store; the class name is its tag on the wire."""


class Set(StoreRequest):
    """Set a key."""

    key: str
    value: bytes


class MultiSet(StoreRequest):
    """Set several keys, each to its value."""

    keys: list[str]
    values: list[bytes]


class Get(StoreRequest):
    """Wait until every key exists and return the values, in order: as many as fit in BATCH bytes, at least one."""

    keys: list[str]
    timeout_s: float


class Wait(StoreRequest):
    """Wait until every key exists."""

    keys: list[str]
    timeout_s: float


class Add(StoreRequest):
    """Add to a key's value, a decimal number, or to 0 if the key does not exist, and return the sum."""

    key: str
    amount: int


class Append(StoreRequest):
    """Append bytes to a value. A key that does not exist counts as empty."""

    key: str
    value: bytes


class CompareSet(StoreRequest):
    """Set a key if its value is `expected`, and return the key's value, or `expected` if the key does not exist.

    An empty `expected` also matches a key that does not exist.
    """

    key: str
    expected: bytes
    desired: bytes


class HasKeys(StoreRequest):
    """Return whether every key exists."""

    keys: list[str]


class Delete(StoreRequest):
    """Delete a key and return whether it existed."""

    key: str


class Count(StoreRequest):
    """Count the keys."""


class List(StoreRequest):
    """List the keys, in the order of their first values."""


class Push(StoreRequest):
    """Append a value to a queue."""

    queue: str
    value: bytes


class Pop(StoreRequest):
    """Wait for a value and take it from its queue. With a timeout of 0 an empty queue is an error."""

    queue: str
    timeout_s: float


class Length(StoreRequest):
    """Return a queue's length."""

    queue: str


class Exchange(StoreRequest):
    """Set the keys of `values`, and return the values of `keys` without waiting; None for a key that does not exist."""

    values: dict[str, bytes]
    keys: list[str]


class OnDisconnect(StoreRequest):
    """Set `key` to an empty value when this connection ends. An empty key cancels this."""

    key: str


ANY = (
    Set
    | MultiSet
    | Get
    | Wait
    | Add
    | Append
    | CompareSet
    | HasKeys
    | Delete
    | Count
    | List
    | Push
    | Pop
    | Length
    | Exchange
    | OnDisconnect
)


class Reply(msgspec.Struct, array_like=True):
    """The reply to a request, or a pushed message."""

    value: Any = None
    error: str = ""  # TIMED_OUT, EMPTY or a message
    pushed: bool = False  # it is not the reply to a request (`messaging.py`)


TIMED_OUT = "timed out"
EMPTY = "empty"


class Missing(Exception):
    """Raised when a request must wait until `slot` is filled: ("key", name), ("queue", name) or ("answers",)."""

    def __init__(self, *slot: str):
        self.slot = slot


# ---- the table ----------------------------------------------------------------------------------------------------------


class Table:
    """Holds the keys and queues, and applies requests to them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}

    def apply(self, request: StoreRequest) -> Any:
        """Apply a request and return the reply's value.

        Raises Missing if the request must wait, ValueError if it is invalid.
        """
        return self._METHODS[type(request)](self, request)

    def filled_slots(self, request: StoreRequest) -> Iterator[tuple[str, str]]:
        """Yield the slots that a request has filled."""
        match request:
            case Set(key) | Add(key) | Append(key) | CompareSet(key):
                yield "key", key
            case Exchange(values):
                yield from (("key", key) for key in values)
            case MultiSet(keys):
                yield from (("key", key) for key in keys)
            case Push(queue):
                yield "queue", queue

    def _set(self, request: Set) -> None:
        self._values[request.key] = request.value

    def _multi_set(self, request: MultiSet) -> None:
        self._values.update(zip(request.keys, request.values, strict=True))

    def _get(self, request: Get) -> list[bytes]:
        self._wait(request)
        values, size = [], 0
        for key in request.keys:
            value = self._values[key]
            size += len(value)
            if values and size > BATCH:
                break
            values.append(value)
        return values

    def _wait(self, request: Get | Wait) -> None:
        for key in reversed(request.keys):  # the last key usually comes last, so the request resumes once
            if key not in self._values:
                raise Missing("key", key)

    def _add(self, request: Add) -> int:
        total = int(self._values.get(request.key, b"0")) + request.amount
        self._values[request.key] = str(total).encode()
        return total

    def _append(self, request: Append) -> None:
        self._values[request.key] = self._values.get(request.key, b"") + request.value

    def _compare_set(self, request: CompareSet) -> bytes:
        value = self._values.get(request.key)
        if value == request.expected or (value is None and not request.expected):
            value = self._values[request.key] = request.desired
        return request.expected if value is None else value

    def _check(self, request: HasKeys) -> bool:
        return all(key in self._values for key in request.keys)

    def _delete(self, request: Delete) -> bool:
        return self._values.pop(request.key, None) is not None

    def _count(self, request: Count) -> int:
        return len(self._values)

    def _list(self, request: List) -> list[str]:
        return list(self._values)

    def _push(self, request: Push) -> None:
        self._queues.setdefault(request.queue, deque()).append(request.value)

    def _pop(self, request: Pop) -> bytes:
        queue = self._queues.get(request.queue)
        if not queue:
            raise Missing("queue", request.queue)
        value = queue.popleft()
        if not queue:
            del self._queues[request.queue]
        return value

    def _length(self, request: Length) -> int:
        return len(self._queues.get(request.queue, ()))

    def _exchange(self, request: Exchange) -> list[bytes | None]:
        self._values.update(request.values)
        return [self._values.get(key) for key in request.keys]

    _METHODS = {  # noqa: RUF012 never changed
        Set: _set,
        MultiSet: _multi_set,
        Get: _get,
        Wait: _wait,
        Add: _add,
        Append: _append,
        CompareSet: _compare_set,
        HasKeys: _check,
        Delete: _delete,
        Count: _count,
        List: _list,
        Push: _push,
        Pop: _pop,
        Length: _length,
        Exchange: _exchange,
    }
