"""Read a record's tools, tool calls and variables for the chat template.

The forms are those of TRL and transformers (https://huggingface.co/docs/trl/dataset_formats#tool-calling):

    tools                  [{"type": "function", "function": {"name", "description", "parameters": {...}}}], or as JSON; also
                           in MCP's form, {"name", "description", "inputSchema"}
    messages               {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name", "arguments"}}]}, then
                           {"role": "tool", "name": ..., "content": ...}
    chat_template_kwargs   {"enable_thinking": false}

Arguments as JSON text (OpenAI's form) become a mapping. A null stands for an absent key, because Arrow writes it so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.data.columns import Message, column
from pipeline.data.rendering import RESERVED
from pipeline.data.tool_messages import as_function

VARIABLES = "chat_template_kwargs"


def template_options(
    record: Mapping[str, Any], tools_key: str | None, tools_of_environment: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return a record's options for the chat template: `tools` and variables. Raise ValueError if they are malformed.

    tools_of_environment: the tools of a record without tools of its own. An empty list in the column stands for no tools.
    """
    options: dict[str, Any] = {"tools": list(tools_of_environment)} if tools_of_environment else {}
    if tools_key and (tools := _parse(column(record, tools_key), tools_key)) is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError(
                f"'{tools_key}' is not a list of JSON schemas of functions. Try tools_key=null to ignore the column"
            )
        options = {"tools": [as_function(tool) for tool in tools]} if tools else {}
    if variables := _parse(record.get(VARIABLES), VARIABLES):
        if not isinstance(variables, dict):
            raise ValueError(f"'{VARIABLES}' is a {type(variables).__name__}, not an object of variables of the chat template")
        if reserved := sorted(RESERVED & variables.keys()):
            raise ValueError(
                f"'{VARIABLES}' has {', '.join(reserved)}, arguments of apply_chat_template; expected only template variables"
            )
        options |= variables
    return options


def without_nulls(value: Any) -> Any:
    """Return a value whose mappings, at any depth, have no null entries: Arrow fills absent keys with null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def read_messages(messages: list[Message]) -> list[Message]:
    """Return messages without null fields, with tool calls whose arguments are mappings. Raise ValueError for malformed calls.

    A turn of the assistant that has tool calls and no content keeps `content: None`.
    """
    return [_read(message) for message in messages]


def _read(message: Message) -> Message:
    read = {key: value for key, value in message.items() if value is not None and (key != "tool_calls" or value)}
    if calls := read.get("tool_calls"):
        if not isinstance(calls, list):
            raise ValueError(f"'tool_calls' is a {type(calls).__name__}, not a list of calls")
        read = {**read, "content": message.get("content"), "tool_calls": [_read_call(call) for call in calls]}
    return read


def _read_call(call: Any) -> dict[str, Any]:
    """Return a tool call as {"function": {"name", "arguments"}, ...}. It may also be given as {"name", "arguments"}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("'tool_calls' has a call without a name; expected {function: {name, arguments}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parse(arguments, f"arguments of tool call {function['name']}") if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise ValueError(f"'tool_calls': the arguments of {function['name']} are a {type(arguments).__name__}, not an object")
    complete = {key: value for key, value in function.items() if value is not None} | {"arguments": arguments or {}}
    if "function" not in call:
        identity = {key: complete.pop(key) for key in ("id", "type") if key in complete}
        return {"type": "function", **identity, "function": complete}
    return {key: value for key, value in call.items() if value is not None} | {"function": complete}


def _parse(value: Any, key: str) -> Any:
    """Return the value of a JSON text, None for a blank text, other values unchanged. Raise ValueError for other texts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise ValueError(f"'{key}' is a string that is not JSON: {error}") from None
