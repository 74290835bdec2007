"""What a rank can be asked: the marked methods of its role, with the types of what they take and answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from pipeline.world import World

Item = TypeVar("Item")


def verb(timeout: str) -> Callable[[Callable], Callable]:
    """Mark a role's method as callable from rank 0; `timeout` is the key under `cluster.timeouts` that bounds it."""

    def mark(method: Callable) -> Callable:
        method.timeout = timeout
        return method

    return mark


class StreamingReply(Generic[Item]):
    """What a verb returns whose answer comes in parts: what is put into it is sent at once. For the thread that serves.

    A verb is annotated `-> StreamingReply[Item]`; to rank 0 its reply is a list[Item].
    """

    def __init__(self) -> None:
        self.unsent: list[Item] = []
        self.ended = False
        self._send: Callable[[list[Item], bool], None] | None = None

    def put(self, item: Item) -> None:
        self.unsent.append(item)
        self._flush()

    def end(self) -> None:
        self.ended = True
        self._flush()

    def send_by(self, send: Callable[[list[Item], bool], None]) -> None:
        """From now on by this, which is given items and whether more follow."""
        self._send = send
        if self.unsent or self.ended:
            self._flush()

    def _flush(self) -> None:
        if self._send:
            items, self.unsent = self.unsent, []
            self._send(items, not self.ended)


@cache
def signature(role: type, name: str) -> tuple[Any, Any, bool]:
    """(type of the argument or None, type of the reply, whether that comes in parts) of a verb.

    Raises AttributeError if it is none.
    """
    method = getattr(role, name)
    if not hasattr(method, "timeout"):
        raise AttributeError(f"{role.__name__}.{name} is not a verb")
    hints = get_type_hints(method)
    parameters = [p for p in inspect.signature(method).parameters if p != "self"]
    argument, reply = hints[parameters[0]] if parameters else type(None), hints.get("return", type(None))
    if get_origin(reply) is StreamingReply:
        return argument, list[get_args(reply)[0]], True
    return argument, reply, False


def run(world: World, role: Any, name: str, argument: Any) -> Any:
    method = getattr(role, name)
    with world.phase("", verb=name):
        return method() if argument is None else method(argument)
