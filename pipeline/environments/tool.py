"""The interface of tools that the policy may call."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol


class ToolError(ValueError):
    """The policy called the tool wrongly; it is told the text, and the episode goes on."""


class ToolSession(Protocol):
    """A tool as one episode has it."""

    @abstractmethod
    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return what the policy is told.

        Raises ToolError for a wrong call, and TimeoutError if it cannot end within `timeout_s` seconds, which the policy is
        told too. Any other error is as one of the environment's `step`.
        """

    def close(self) -> None:
        """End what the session started. An episode that is cut is not closed, only forgotten."""


class Tool(Protocol):
    """One object serves all episodes of an environment on an engine, from several threads."""

    parameters: dict[str, type]  # the arguments' names and types; a call has all of them, and no other

    @abstractmethod
    def open(self) -> ToolSession:
        """Return the session for an episode's first call of the tool. A tool that remembers nothing may be its own session."""
