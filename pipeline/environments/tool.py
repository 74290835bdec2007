"""The interface of tools that the policy may call."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

from pipeline.data.tool_messages import as_function

TYPES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


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
    """A tool. One object serves all episodes of an environment on an engine, from several threads.

    Prompts show the tool's JSON schema. It is made of `parameters` and the descriptions, or is `schema`. Where these are
    attributes of the class, the job reads them without making an object.
    """

    parameters: dict[str, type]
    """Names and types of the arguments. A call must have all of them and no other."""
    description: str = ""
    """Tells the policy what the tool does."""
    descriptions: dict[str, str] = {}  # noqa: RUF012 - never changed
    """Descriptions of arguments, by name."""
    schema: dict[str, Any] | None = None
    """The JSON schema, in place of the above: of the arguments ({"type": "object", "properties": ...}), or of the function in
    OpenAI's or MCP's form. A call must have the `required` arguments, and no others than `properties`."""

    @abstractmethod
    def open(self) -> ToolSession:
        """Return the session for an episode's first call of the tool. A stateless tool may return itself."""
        ...


JSON_TYPES: dict[str, type] = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


def function_schema(name: str, tool: Tool | type[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a tool in OpenAI's form: {"type": "function", "function": {name, description, parameters}}.

    name: how the policy calls it. Raises ValueError if `schema` is no schema.
    """
    description = getattr(tool, "description", "")
    described = {"name": name, **({"description": description} if description else {})}
    schema = getattr(tool, "schema", None)
    if schema is None:
        properties = {key: {"type": _json_type(kind)} for key, kind in tool.parameters.items()}
        for key, text in getattr(tool, "descriptions", {}).items():
            properties[key]["description"] = text
        schema = {"type": "object", "properties": properties, "required": list(properties)}
    if not isinstance(schema, dict):
        raise ValueError(f"tool {name}: got a {type(schema).__name__} as `schema`; expected a JSON schema")
    function = as_function(schema).get("function") or (schema if "parameters" in schema else {"parameters": schema})
    return {"type": "function", "function": {**described, **function, **described}}  # templates write keys in their order


def check_arguments(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Raise MalformedCall if the arguments of a call do not fit a tool's JSON schema.

    Types within lists and objects may differ.
    """
    parameters = schema["function"].get("parameters", {})
    properties = parameters.get("properties", {})
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    closed = "properties" in parameters and not parameters.get("additionalProperties")
    unknown = [name for name in arguments if closed and name not in properties]
    if missing or unknown:
        raise MalformedCall(f"the arguments are: {', '.join(properties)}; not: {', '.join(arguments) or 'none'}")
    for name, value in arguments.items():
        described = properties.get(name)
        kind = JSON_TYPES.get(str(described.get("type"))) if isinstance(described, dict) else None
        fits = kind is None or isinstance(value, (int, float) if kind is float else kind)
        if kind and (not fits or (isinstance(value, bool) and kind is not bool)):
            raise MalformedCall(f"argument {name} is {TYPES[kind]}")


def _json_type(kind: type) -> str:
    for name, known in JSON_TYPES.items():
        if known is kind:
            return name
    raise ValueError(f"got the type {kind} in `parameters`; expected one of: {', '.join(kind.__name__ for kind in TYPES)}")
