"""Read calls of tools from a text, and tell their results: Hermes' way, and a short one for a single tool.

Leaves out: other models' ways (Llama's <|python_tag|>, Mistral's [TOOL_CALLS]).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

THOUGHT_ENDS = "</think>"  # what a model thinks before it calls nothing


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. error: why it cannot be carried out; then it has no name, and no arguments."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str = ""


class CallFormat(Protocol):
    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in the order of the text; none: the text is the policy's final answer."""

    def message(self, results: list[str]) -> dict[str, str]:
        """Return what the policy is told, {"role", "content"}: the results in the order of the calls."""


class HermesCalls:
    """`<tool_call>{"name": "calculator", "arguments": {"expression": "47*85"}}</tool_call>`, as Hermes and Qwen models write.

    The results are one message of role "tool", a line or more for each; the model's chat template wraps it. How the policy
    learns which tools there are is the prompt's matter: `tools` in policy.tokenizer.chat_template_kwargs, or a system prompt.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def calls(self, text: str) -> list[ToolCall]:
        pieces = text.rpartition(THOUGHT_ENDS)[2].split(self.OPEN)[1:]
        return [self._call(piece) for piece in pieces]

    def message(self, results: list[str]) -> dict[str, str]:
        return {"role": "tool", "content": "\n".join(results)}

    def _call(self, piece: str) -> ToolCall:
        written, close, _ = piece.partition(self.CLOSE)
        if not close:
            return ToolCall(error=f"a {self.OPEN} without {self.CLOSE}")
        try:
            call = json.loads(written)
            json.dumps(call, ensure_ascii=False).encode()  # half a surrogate pair ("\ud800") is no text
        except (ValueError, RecursionError) as error:
            return ToolCall(error=f"not JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return ToolCall(error='a call is {"name": ..., "arguments": {...}}')
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return ToolCall(error="arguments are a JSON object")
        return ToolCall(call["name"], arguments)


class MarkedCalls:
    """`[47*85]`: the one argument of the one tool, between two marks. What follows the closing mark is not read: a turn should
    end there (its token in policy.generation.stop_token_ids).

    reply: what is told, with {} for the result.
    """

    def __init__(self, tool: str, parameter: str, open: str, close: str, reply: str) -> None:
        self._tool, self._parameter, self._reply = tool, parameter, reply
        self._open, self._close = open, close

    def calls(self, text: str) -> list[ToolCall]:
        written, close, _ = text.partition(self._open)[2].partition(self._close)
        return [ToolCall(self._tool, {self._parameter: written})] if close else []

    def message(self, results: list[str]) -> dict[str, str]:
        return {"role": "tool", "content": self._reply.replace("{}", results[0])}
