"""Parse tool calls from a text and format their results: in Hermes' format, or in a short format for a single tool.

Leaves out: other models' formats (Llama's <|python_tag|>, Mistral's [TOOL_CALLS]).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import override

THOUGHT_ENDS = "</think>"  # calls before it, in the model's reasoning, do not count


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. error: why the call cannot run; it then has neither name nor arguments."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class CallFormat(Protocol):
    """Parses tool calls in the policy's text, and formats their results."""

    @abstractmethod
    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in the order of the text; [] if the text is the policy's final answer."""
        ...

    @abstractmethod
    def message(self, results: list[str]) -> dict[str, str]:
        """Return the observation {"role", "content"} with the results in the order of the calls."""
        ...


class HermesCalls(CallFormat):
    """The format of Hermes and Qwen models.

    A call is `<tool_call>{"name": "calculator", "arguments": {"expression": "47*85"}}</tool_call>`. The results form one
    message of role "tool", in which each has one line or more; the model's chat template wraps the message. The prompt tells
    the policy which tools exist: `tools` in policy.tokenizer.chat_template_kwargs, or a system prompt.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    @override
    def calls(self, text: str) -> list[ToolCall]:
        pieces = text.rpartition(THOUGHT_ENDS)[2].split(self.OPEN)[1:]
        return [self._call(piece) for piece in pieces]

    @override
    def message(self, results: list[str]) -> dict[str, str]:
        return {"role": "tool", "content": "\n".join(results)}

    def _call(self, piece: str) -> ToolCall:
        content, close, _ = piece.partition(self.CLOSE)
        if not close:
            return ToolCall(error=f"a {self.OPEN} without {self.CLOSE}")
        try:
            call = json.loads(content)
            json.dumps(call, ensure_ascii=False).encode()  # half of a surrogate pair ("\ud800") cannot be encoded
        except (ValueError, RecursionError) as error:
            return ToolCall(error=f"not JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return ToolCall(error='a call is {"name": ..., "arguments": {...}}')
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return ToolCall(error="arguments are a JSON object")
        return ToolCall(call["name"], arguments)


class MarkedCalls(CallFormat):
    """The format of a single tool with a single argument: the argument between two marks, such as `[47*85]`.

    Text after the closing mark is not read; a turn should end there (its token in policy.generation.stop_token_ids). reply: the
    observation, with {} for the result.
    """

    def __init__(self, tool: str, parameter: str, open_mark: str, close_mark: str, reply: str) -> None:
        self._tool, self._parameter, self._reply = tool, parameter, reply
        self._open_mark, self._close_mark = open_mark, close_mark

    @override
    def calls(self, text: str) -> list[ToolCall]:
        argument, close, _ = text.partition(self._open_mark)[2].partition(self._close_mark)
        return [ToolCall(self._tool, {self._parameter: argument})] if close else []

    @override
    def message(self, results: list[str]) -> dict[str, str]:
        return {"role": "tool", "content": self._reply.replace("{}", results[0])}
