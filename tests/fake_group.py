"""Stands in for a group of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeGroup:
    """Answers like `RpcGroup`: the method of a verb's name takes its call, with one argument or with a list of parts."""

    def call(self, verb: Callable[..., Any], *argument: Any) -> Any:
        return getattr(self, verb.__name__)(*argument)

    def scatter(self, verb: Callable[..., Any], parts: list[Any]) -> Any:
        return getattr(self, verb.__name__)(parts)
