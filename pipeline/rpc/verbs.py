"""The verbs of a role: its methods marked with @verb, with their timeouts and the types of their arguments and replies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pipeline.job.world import World

Item = TypeVar("Item")
Method = TypeVar("Method", bound=Callable[..., Any])

TIMEOUT = "timeout"
"""A verb's attribute: the key under `cluster.timeouts` that bounds it."""


def verb(timeout: str) -> Callable[[Method], Method]:
    """Mark a role's method, of at most one argument, as a verb. timeout: the key under `cluster.timeouts` that bounds it."""

    def mark(method: Method) -> Method:
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
        """Send items with `send` from now on: a function of (items, whether more follow)."""
        self._send = send
        if self.unsent or self.ended:
            self._flush()

    def _flush(self) -> None:
        if self._send:
            items, self.unsent = self.unsent, []
            self._send(items, not self.ended)


class Signature(NamedTuple):
    """A verb's timeout, and the types of its argument and reply."""

    timeout: str
    argument: Any  # its type; NoneType if there is none
    reply: Any  # its type; list[Item] for a StreamingReply[Item]
    in_parts: bool


@cache
def signature(method: Callable[..., Any]) -> Signature:
    """Return the signature of a verb. Raises AttributeError if the method is not a verb."""
    if not hasattr(method, TIMEOUT):
        raise AttributeError(f"{method.__qualname__} is not a verb")
    hints = get_type_hints(method)
    parameters = [p for p in inspect.signature(method).parameters if p != "self"]
    argument, reply = hints[parameters[0]] if parameters else type(None), hints.get("return", type(None))
    in_parts = get_origin(reply) is StreamingReply
    return Signature(getattr(method, TIMEOUT), argument, list[get_args(reply)[0]] if in_parts else reply, in_parts)


def run(world: World, role: Any, name: str, argument: Any) -> Any:
    """Run a verb of `role` and return its reply."""
    method = getattr(role, name)
    with world.phase("", verb=name):
        return method() if argument is None else method(argument)
