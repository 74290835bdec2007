"""Types of a recipe's values, for the annotations of its sections.

They convert what YAML, quotes and environment variables make necessary: "3" and 3.0 are whole numbers, 3 is a text, yes true.
They refuse what Python would accept: true is neither a number nor a text, and nan and infinity are not numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, Strict
from pydantic_core import PydanticCustomError, core_schema

MISSING = "???"
"""Default of a key that the recipe must give."""
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _truth(value: Any) -> Any:
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "expected a number")
    return value


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("text_type", "expected a text, in quotes if '{word}' is meant", {"word": str(value).lower()})
    return str(value) if isinstance(value, int | float) else value


@dataclass(frozen=True)
class _Before:
    """Pass a value through `function` before it is validated: pydantic's BeforeValidator, which costs more at import."""

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.function, handler(kind))


Bool = Annotated[bool, Strict(), _Before(_truth)]
Int = Annotated[int, _Before(_not_bool)]
Float = Annotated[float, Field(allow_inf_nan=False), _Before(_not_bool)]
Text = Annotated[str, _Before(_text)]
Positive = Annotated[Int, Field(ge=1)]
NotNegative = Annotated[Int, Field(ge=0)]
