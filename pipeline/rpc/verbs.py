"""The verbs of a role: its methods marked with @verb, with the types of their argument and reply."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from pipeline.job.world import World

Item = TypeVar("Item")

TIMEOUT = "timeout"
"""A verb's attribute: the key under `cluster.timeouts` that bounds it."""


def verb(timeout: str) -> Callable[[Callable], Callable]:
    """Mark a role's method as a verb. timeout: the key under `cluster.timeouts` that bounds it."""

    def mark(method: Callable) -> Callable:
        setattr(method, TIMEOUT, timeout)
        return method

    return mark


class StreamingReply(Generic[Item]):
    """The return value of a verb that replies in parts; each item is sent at once. Not thread-safe.

    Annotate the verb `-> StreamingReply[Item]`; rank 0 gets a list[Item].
    """

    def __init__(self) -> None:
        self.unsent: list[Item] = []
        self.ended = False
        self._send: Callable[[list[Item], bool], None] | None = None

    def put(self, item: Item) -> None:
        """Send an item."""
        self.unsent.append(item)
        self._flush()

    def end(self) -> None:
        """End the reply."""
        self.ended = True
        self._flush()

    def send_by(self, send: Callable[[list[Item], bool], None]) -> None:
        """Send through this function from now on. send: takes items and whether more follow."""
        self._send = send
        if self.unsent or self.ended:
            self._flush()

    def _flush(self) -> None:
        if self._send:
            items, self.unsent = self.unsent, []
            self._send(items, not self.ended)


@cache
def signature(role: type, name: str) -> tuple[Any, Any, bool]:
    """Return a verb's (argument type or None, reply type, whether it replies in parts).

    Raises AttributeError if the method is not a verb.
    """
    method = getattr(role, name)
    if not hasattr(method, TIMEOUT):
        raise AttributeError(f"{role.__name__}.{name} is not a verb")
    hints = get_type_hints(method)
    parameters = [p for p in inspect.signature(method).parameters if p != "self"]
    argument, reply = hints[parameters[0]] if parameters else type(None), hints.get("return", type(None))
    if get_origin(reply) is StreamingReply:
        return argument, list[get_args(reply)[0]], True
    return argument, reply, False


def run(world: World, role: Any, name: str, argument: Any) -> Any:
    """Run a verb of `role` and return its reply."""
    method = getattr(role, name)
    with world.phase("", verb=name):
        return method() if argument is None else method(argument)
