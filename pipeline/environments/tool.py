"""The interface of tools that the policy may call."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol


class ToolError(ValueError):
    """Raised if the policy called the tool wrongly. The policy receives the error's text, and the episode continues."""


class MalformedCall(ToolError):
    """Raised for a call that no tool can take: unreadable, of an unknown tool, or with other arguments than the tool has."""


class ToolSession(Protocol):
    """The state of a tool in one episode."""

    @abstractmethod
    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return the result for the policy.

        Raises ToolError for a wrong call, and TimeoutError if it cannot end within `timeout_s` seconds; the policy gets both as
        text. Other errors count as errors of the environment's `step`.
        """
        ...

    def close(self) -> None:
        """End what the session started. Sessions of truncated episodes are garbage-collected without `close`."""


class Tool(Protocol):
    """A tool. One object serves all episodes of an environment on an engine, from several threads."""

    parameters: dict[str, type]
    """Names and types of the arguments. A call must have all of them and no other."""

    @abstractmethod
    def open(self) -> ToolSession:
        """Return the session for an episode's first call of the tool. A stateless tool may return itself."""
        ...
