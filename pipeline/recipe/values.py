"""Types of a recipe's values, for the annotations of its sections.

They accept the forms that YAML, quotes and environment variables produce: "3" and 3.0 as integers, 3 as a text, yes as true.
They refuse some values that Python converts: true is neither a number nor a text, and nan and infinity are not numbers.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, LiteralString

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, Strict
from pydantic_core import PydanticCustomError, core_schema

from pipeline.recipe.problems import RecipeError

MISSING = "???"
"""Default of a key that the recipe must set."""


HF_OVERRIDES = (
    "Values that replace keys of the model's config.json. Keys of a *_config and of RoPE (rope_scaling, rope_parameters or"
    " rope_theta) are merged with the file: a new scaling keeps the model's rope_theta, and null removes the scaling."
)
"""Description of `hf_config_overrides`, of every model."""

CHAT_TEMPLATE = (
    "A Jinja template; the path of a template file, or of a folder whose tokenizer has a template; or the name of one of the"
    " tokenizer's templates. null, default: the tokenizer's default template. On the command line, a template that begins"
    " with { needs YAML quotes inside the shell's quotes."
)
"""Meaning of a key `chat_template`."""


def is_template(text: str) -> bool:
    """Return whether a text is a Jinja template, not the path or the name of one."""
    return "{{" in text or "{%" in text


def interpolation(text: str) -> Any:
    """Return `text`, typed as Any: a field's default that refers to another key, such as `${policy.precision}`."""
    return text


_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _parse_bool(value: Any) -> Any:
    return _BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "expected a number")
    return value


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError(
            "text_type", "expected a string, in quotes if '{word}' is meant", {"word": str(value).lower()}
        )
    return str(value) if isinstance(value, int | float) else value


@dataclass(frozen=True)
class Check:
    """Refuse a value that has the right type if `wrong` returns a message, `got ...; expected ...`.

    wrong: a function of the value; None if it is right. A message that must not show the value leaves it out. code: the
    problem's code.
    """

    wrong: Callable[[Any], str | None]
    code: LiteralString = "bad-format"

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._passed, handler(kind))

    def _passed(self, value: Any) -> Any:
        code: Any = self.code
        try:
            message = self.wrong(value)
        except RecipeError as error:  # of what the check reads, such as installed packages
            code, message = error.problems[0].code, error.problems[0].message
        if message is not None:
            raise PydanticCustomError(code, "{message}", {"message": message})
        return value


@dataclass(frozen=True)
class Live:
    """Mark a field whose value may change between two steps of a run (launch/steer.py)."""

    entries: tuple[str, ...] = ()  # of a mapping: those that may; empty: the value as a whole
    within: str = ""  # only in sections whose dotted key begins so


LIVE = Live()

Bool = Annotated[bool, Strict(), BeforeValidator(_parse_bool)]
Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_refuse_bool)]
Text = Annotated[str, BeforeValidator(_text)]
Positive = Annotated[Int, Field(ge=1)]
NotNegative = Annotated[Int, Field(ge=0)]


IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^:]+)")
"""A user's code in a file: the path of the file, and the name in it."""


def not_a_kind(
    kind: str,
    kinds: Collection[str],
    expected: str = "a kind, or the dotted path of a class or a function",
    files: bool = False,
) -> str | None:
    """Return an error if `kind` is not one of `kinds` and cannot be the path of a user's code, else None.

    files: whether the path may be FILE.py:NAME too, not only a dotted path.
    """
    parts = kind.split(".")
    if kind in kinds or (len(parts) > 1 and all(part.isidentifier() for part in parts)):
        return None
    if files and (found := IN_FILE.fullmatch(kind)) and found["name"].isidentifier():
        return None
    near = difflib.get_close_matches(kind.lower(), list(kinds), 1, 0.75)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(kinds)}" if kinds else ""
    if ".py" in kind:
        hint = "For `right` in my_reward.py beside the recipe, give my_reward.right"
        hint += " or my_reward.py:right" if files else ""
    module = kind.removeprefix("./").removesuffix(".py").partition(".")[0]
    if "-" in module and ("." in kind or "/" in kind):
        renamed = f"{module.replace('-', '_')}.py"
        hint = f"'{module}' has a hyphen, which no module's name can have. Rename the file to {renamed}"
    return f"got '{kind}'; expected {expected}. {hint}".removesuffix(". ")


# ---- texts that become lines of a batch script, or names of files and variables ---------------------------------------------
# Values are quoted wherever a shell reads them. A newline cannot be: sbatch's options are comments of a script, one a line.

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RANK_VARIABLES = tuple(
    f"HETSTEP_{name}"
    for name in (
        *("RUN_DIR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "ATTEMPT", "COMPONENT", "NODE"),
        *("JOB_ID", "END_TIME", "SIGNALS"),
    )
)
"""Variables that the launcher sets for each rank; see launch/executors/executor.py."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, other line ends of some programs, and surrogates (halves of UTF-16 pairs), which no file can hold."""


def _line_error(text: str) -> str | None:
    return f"got {text!a}; expected a string without control characters" if _CONTROL.search(text) else None


def _word_error(text: str) -> str | None:
    return f"got {text!a}; expected a name without blanks" if " " in text else None


def _folder_error(text: str) -> str | None:
    return (
        f"got {text}; expected a folder without % and \\, which Slurm and submitit replace" if set("%\\") & set(text) else None
    )


def _variable_error(name: str) -> str | None:
    if not VARIABLE.fullmatch(name):
        return f"got the name {name!a}; expected letters, digits and _, and no digit first, as in NCCL_DEBUG"
    return f"got {name}, which the launcher sets for each rank. Try without it" if name in RANK_VARIABLES else None


def _value_error(value: str) -> str | None:
    return "got control characters in the value; expected a text without them" if _CONTROL.search(value) else None


def seconds(text: str) -> int:
    """Return the seconds of days:hours:minutes:seconds, as NeMo-RL writes them: 13500 for 00:03:45:00. Raises ValueError."""
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"got '{text}'; expected days:hours:minutes:seconds in quotes, as in '00:03:45:00'")
    days, hours, minutes, rest = map(int, parts)
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each leaf of nested values, at or below `key`. An empty mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves(below, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, value


def _duration_error(text: str) -> str | None:
    try:
        return None if seconds(text) else f"got '{text}', which is 0 seconds; expected a longer time, or null"
    except ValueError as error:
        return str(error)


Line = Annotated[Text, Check(_line_error)]
Word = Annotated[Line, Check(_word_error)]  # `scontrol show job` separates its fields by blanks
Folder = Annotated[Line, Check(_folder_error)]
DottedPath = Annotated[Line, Check(lambda path: not_a_kind(path, (), "a dotted path, such as my_module.my_function"))]
"""The dotted path of user code."""
Duration = Annotated[Text, Check(_duration_error)]
Variables = dict[Annotated[str, Check(_variable_error)], Annotated[Text, Check(_value_error)]]
"""Environment variables of ranks, whose values may be secrets. `env_vars` among the kwargs of a user's code may be anything."""
