"""The tool that says what an arithmetic expression is worth."""

from __future__ import annotations

from typing import Any, ClassVar

from pipeline.environments.arithmetic import evaluate
from pipeline.environments.tool import Tool, ToolError, ToolSession


class Calculator(Tool, ToolSession):
    """`{"expression": "47*85"}` -> `3995`. Always ends within milliseconds."""

    parameters: ClassVar = {"expression": str}

    def open(self) -> ToolSession:
        return self

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        try:
            return evaluate(arguments["expression"])
        except ValueError as error:
            raise ToolError(str(error)) from None
