"""The forms of tools, tool calls and turns with calls in messages. Nothing here imports keys, so kinds of environments may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. error: why it cannot run."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    id: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The call in the form of `tool_calls` of a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The parts of a turn. malformed: why a part that looks like a call is none; "" if there is no such part."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message. A malformed call is not part of it."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.content}
        turn |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return turn | ({"tool_calls": [call.message for call in self.calls]} if self.calls else {})


def as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in MCP's form, {"name", "description", "inputSchema"}, in OpenAI's form. Other forms do not change."""
    if "inputSchema" not in tool or "name" not in tool:
        return dict(tool)
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["inputSchema"]}}
