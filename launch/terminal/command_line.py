"""Parse, describe and run command lines of `key=value`, for every command in launch/.

A command declares its keys as the fields of a dataclass, and runs a function that takes an instance:

    @dataclass(frozen=True)
    class ExportRequest:
        run: Annotated[Path, Key("RUN_DIR", "the run's folder", bare=True)]
        step: Annotated[int | None, Key("N", "step of the checkpoint; default: the latest")] = None

    def main(arguments: list[str]) -> int:
        return command_line.run(__doc__, ExportRequest, export, arguments)

A field without a default is required. Its type decides how the value is parsed: str, Path, bool, int (not negative), float
(above 0), Literal. If a key is given several times, the last value counts, so that users can override a wrapper's; a list
takes all values. A method `problems` of the dataclass may add checks across keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import os
import re
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from launch.terminal import console
from launch.terminal.safe_text import no_more_output, plain
from launch.terminal.units import is_count
from pipeline.config import Problem, RecipeError, refuse

HELP = ("-h", "--help", "help")
FOREIGN = "-+~"  # first characters of options and of Hydra's overrides
ORIGIN = "the command line"
MAX_CHARACTERS = 80
"""Maximum number of characters of an argument that an error message repeats."""


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Request = TypeVar("Request", bound=Dataclass)


@dataclass(frozen=True)
class Key:
    """The usage text and the parsing of a command's key.

    value: placeholder of the value in the usage text, such as RUN_DIR. meaning: the key's description in the usage text. bare:
    whether `key=` may be omitted. read: a function that parses the value, in place of the field's type; it raises ValueError
    with the expected format. others: whether the field takes every `key=value` that matches no other field. options: a function
    of all arguments that returns whether the field takes everything else too, such as `--option VALUE` and `+key=value`.
    """

    value: str
    meaning: str
    bare: bool = False
    read: Callable[[str], Any] | None = None
    others: bool = False
    options: Callable[[list[str]], bool] | None = None


def run(description: str | None, request: type[Request], command: Callable[[Request], int], arguments: list[str]) -> int:
    """Run a command, and return its exit status: 2 after a RecipeError or a file error, 130 after Ctrl-C.

    description: the usage text. The keys are listed after its first paragraph.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale such as C cannot encode every character
    try:
        status = _run(description, request, command, arguments)
        sys.stdout.flush()
        return status
    except RecipeError as error:
        console.print_problems(error.problems)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        no_more_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        print(plain(f"error: {_clip(str(error.filename))}: {error.strerror}"), file=sys.stderr)
        return 2


def _run(description: str | None, request: type[Request], command: Callable[[Request], int], arguments: list[str]) -> int:
    if arguments and arguments[0] in HELP:
        _print_usage(description, request)
        return 0
    try:
        parsed = parse(request, arguments)
    except RecipeError:
        if arguments:
            raise
        _print_usage(description, request)
        return 2
    return command(parsed)


def _print_usage(description: str | None, request: type) -> None:
    first, _, rest = (description or "").strip().partition("\n\n")
    shown: dict[str, str] = {}
    for name, (_, key) in _keys(request).items():
        optional = f"; `{name}=` may be omitted" if key.bare else ""
        shown[key.value if key.others else f"{name}={key.value}"] = key.meaning + optional
    console.print_usage(first, shown, rest)


# ---- parsing ------------------------------------------------------------------------------------------------------------


def parse(request: type[Request], arguments: list[str]) -> Request:
    """Parse a command line into the request's dataclass. Raises RecipeError with all problems."""
    keys = _keys(request)
    named_keys = {name: details for name, (_, details) in keys.items() if not details.others}
    rest = next((name for name in keys if name not in named_keys), None)
    bare = next((name for name, details in named_keys.items() if details.bare), None)
    texts_of: dict[str, list[str]] = {}
    overrides: list[str] = []
    problems: list[Problem] = []
    suggested: set[str] = set()  # keys that the problems suggest
    takes_options = bool(rest) and (options := keys[rest][1].options) is not None and options(arguments)
    if not takes_options:
        arguments = _without_blanks(arguments, problems, suggested, dotted=rest is not None)
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            problems.append(_problem(ascii(argument), "bad-format", "is not UTF-8"))
        elif equals and name in named_keys:
            texts_of.setdefault(name, []).append(value)
        elif takes_options:
            overrides.append(argument)
        elif bare and (not equals or os.path.exists(argument)) and not argument.startswith(tuple(FOREIGN)):
            texts_of.setdefault(bare, []).append(argument)
        elif not equals or name.startswith(tuple(FOREIGN)):
            problem, key = _no_key(argument, arguments[number + 1 : number + 2], named_keys)
            problems.append(problem)
            suggested.add(key)
        elif rest:
            overrides.append(argument)
        else:
            problems.append(_unknown(argument, named_keys))
    values: dict[str, Any] = {rest: overrides} if rest else {}
    for name, texts in texts_of.items():
        values[name] = _value(name, *keys[name], texts, problems)
    for field in dataclasses.fields(request):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in values and field.name not in suggested:
            problems.append(
                Problem(field.name, "missing-value", f"expected {field.name}={named_keys[field.name].value}", ORIGIN)
            )
    refuse(problems)
    parsed = request(**values)
    refuse(getattr(parsed, "problems", tuple)())
    return parsed


def _without_blanks(arguments: list[str], problems: list[Problem], suggested: set[str], dotted: bool) -> list[str]:
    """Return the arguments without those of each `key = value` with blanks around `=`; add a problem for each of these.

    A shell splits `grpo.seed = 3` into `grpo.seed`, `=` and `3`. dotted: whether dotted keys exist, so that `grpo.seed 3` is
    one without its `=`.
    """
    rest, left = [], list(arguments)
    while left:
        first, *others = left
        count = _count_split(first, *others[:2])
        if count == 1 and dotted and _lacks_equals(first, *others[:1]):
            count = 2
        if count == 1:
            rest.append(first)
        else:
            key, value = first.rstrip("="), "".join(left[1:count]).lstrip("=")
            given = " ".join(left[:count])
            message = f"got '{given}'; expected {key}={value}{', without spaces around `=`' if '=' in given else ''}"
            problems.append(_problem(key, "bad-format", _clip(message, 3 * MAX_CHARACTERS)))
            suggested.add(key)
        left = left[count:]
    return rest


def _count_split(first: str, second: str = "", third: str = "") -> int:
    """Return how many of three successive arguments are parts of one `key=value` with blanks around `=`; 1 if none is split."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*=?", first) or first in HELP:
        return 1
    if first.endswith("="):
        return 2 if second and "=" not in second and not second.startswith(tuple(FOREIGN)) else 1
    if second == "=":
        return 3 if third and "=" not in third else 1
    return 2 if re.fullmatch(r"=[^=].*", second) else 1


def _lacks_equals(key: str, value: str = "") -> bool:
    """Return whether two successive arguments are a dotted key and its value."""
    is_key = re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", key) and not key.endswith((".yaml", ".yml")) and not os.path.exists(key)
    is_value = value and "=" not in value and (_number(value) == _number(value) or not value.startswith(tuple(FOREIGN)))
    return bool(is_key and is_value)


def _keys(request: type) -> dict[str, tuple[Any, Key]]:
    """Return field name -> (type, Key), in the order of the fields."""
    return {name: get_args(hint) for name, hint in get_type_hints(request, include_extras=True).items()}


def _value(name: str, kind: Any, key: Key, texts: list[str], problems: list[Problem]) -> Any:
    """Return the value of a key, parsed from all given texts for a list, else from the last text. Adds errors to `problems`."""
    several = get_origin(kind) is list
    if several:
        (kind,) = get_args(kind)
    elif get_origin(kind) in (Union, types.UnionType):
        kind = next(member for member in get_args(kind) if member is not type(None))
    values = []
    for text in texts if several else texts[-1:]:
        try:
            values.append(key.read(text) if key.read else _read(kind, text))
        except (ValueError, OSError) as error:
            code = "missing-value" if not text else "not-a-choice" if get_origin(kind) is Literal else "wrong-type"
            code, expected = ("unreadable", error.strerror) if isinstance(error, OSError) else (code, f"expected {error}")
            problems.append(Problem(name, code, f"got '{_clip(text)}'; {expected}"))
    return values if several else values[-1] if values else None


def _read(kind: Any, text: str) -> Any:
    """Parse a value. Raises ValueError with the expected format, and OSError for an invalid path."""
    if not text:
        raise ValueError("a value")
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if get_origin(kind) is Literal and text in get_args(kind):
        return text
    if kind is int and is_count(text):
        return int(text)
    if kind is float and _number(text) > 0:
        return float(text)
    if kind is Path:
        try:
            os.stat(text)
        except FileNotFoundError:
            pass  # the command reports it, if it needs the file
        return Path(text).absolute()
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        raise ValueError(" or ".join(get_args(kind)))
    raise ValueError({bool: "true or false", int: "a whole number, at least 0", float: "a number above 0"}[kind])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _clip(text: str, limit: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


# ---- arguments that are not keys ----------------------------------------------------------------------------------------


def _problem(argument: str, code: str, message: str) -> Problem:
    return Problem(_clip(argument), code, message, ORIGIN)


def _unknown(argument: str, keys: dict[str, Key]) -> Problem:
    name = argument.partition("=")[0]
    near = difflib.get_close_matches(name, keys, 1)
    hint = f"did you mean {near[0]}=? " if near else ""
    known = ", ".join(f"{word}={key.value}" for word, key in keys.items())
    return _problem(name, "unknown-key", f"is not a key; {hint}the keys are: {known}")


def _no_key(argument: str, following: list[str], keys: dict[str, Key]) -> tuple[Problem, str]:
    """Return (problem, suggested key or "") for an argument that is not key=value.

    The problem suggests a key=value for options such as --key and for Hydra's overrides.
    """
    option, equals, value = argument.partition("=")
    name = option.lstrip(FOREIGN)
    why = f"begins with '{argument[0]}', but no key does" if equals else "is not key=value"
    if name == option:
        key = next((word for word in ("recipe", "sweep") if word in keys), "")
        suggestion = f"{key}={_clip(argument)}" if key else "key=value"
        if argument in keys:
            suggestion = f"{argument}={keys[argument].value}"
        elif key and "." in argument and "/" not in argument and not argument.endswith(".yaml"):  # a dotted key
            key, suggestion = "", f"{_clip(argument)}=VALUE"
        return _problem(argument, "bad-format", f"{why}; try {suggestion}"), key
    name = "recipe" if name in ("config", "config-path", "config-name") and "recipe" in keys else name.replace("-", "_")
    if option.startswith("~"):
        value = "null"
    elif not equals:
        is_value = following and "=" not in following[0] and not following[0].startswith(tuple(FOREIGN))
        value = following[0] if is_value else "true"
    return _problem(argument, "bad-format", f"{why}; try {name}={_clip(value)}"), name
