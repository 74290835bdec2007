"""Command lines of `key=value`: how every command reads its own, describes them, and ends.

A command declares its keys as the fields of a dataclass, and runs a function of that:

    @dataclass(frozen=True)
    class Request:
        run: Annotated[Path, Key("RUN_DIR", "the run's folder", bare=True)]
        step: Annotated[int | None, Key("N", "which of its checkpoints; default: the latest")] = None

    def main(arguments: list[str]) -> int:
        return command_line.run(__doc__, Request, export, arguments)

A field without a default must be given. Its type says how the value is read: str, Path, bool, int (not negative), float
(above 0), Literal. If a key is given several times, the last one counts, so that users can replace what a wrapper gives; a list
takes them all. A method `problems` of the dataclass may add checks across keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from launch.terminal import no_more_output, plain
from launch.units import is_count
from pipeline import secrets
from pipeline.config import Problem, RecipeError, listed, refuse

HELP = ("-h", "--help", "help")
FOREIGN = "-+~"  # what keys begin with on other commands: options, and Hydra's overrides
ORIGIN = "the command line"
SHOWN = 80
"""Characters of an argument that are repeated in an error."""
Request = TypeVar("Request")


@dataclass(frozen=True)
class Key:
    """A command's own key.

    value: its placeholder in the usage text, such as RUN_DIR; meaning: its description there
    bare: `key=` may be left out
    read: converts the value in place of the field's type; raises ValueError with what it expects
    others: the field takes all `key=value` that are no field's
    """

    value: str
    meaning: str
    bare: bool = False
    read: Callable[[str], Any] | None = None
    others: bool = False


def run(description: str, request: type[Request], command: Callable[[Request], int], arguments: list[str]) -> int:
    """Run a command, and return its exit status: 2 for a RecipeError or a file that cannot be used, 130 for Ctrl-C.

    description: the usage text; what the keys are goes between its first paragraph and the rest
    """
    try:
        status = _run(description, request, command, arguments)
        sys.stdout.flush()
        return status
    except RecipeError as error:
        print(plain(secrets.redacted(f"error: {listed(error.problems)}")), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has read enough
        no_more_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        print(plain(f"error: {_clipped(str(error.filename))}: {error.strerror}"), file=sys.stderr)
        return 2


def _run(description: str, request: type[Request], command: Callable[[Request], int], arguments: list[str]) -> int:
    if arguments and arguments[0] in HELP:
        print(usage(description, request))
        return 0
    try:
        asked = parse(request, arguments)
    except RecipeError:
        if arguments:
            raise
        print(usage(description, request))
        return 2
    return command(asked)


def usage(description: str, request: type) -> str:
    first, _, rest = description.strip().partition("\n\n")
    shown = {}
    for name, (_, own) in _keys(request).items():
        left_out = f"; `{name}=` may be left out" if own.bare else ""
        shown[own.value if own.others else f"{name}={own.value}"] = own.meaning + left_out
    width = max(map(len, shown)) + 2
    lines = [f"    {name:{width}s}{meaning}" for name, meaning in shown.items()]
    return "\n\n".join(filter(None, (first, "\n".join(lines), rest)))


# ---- reading it -----------------------------------------------------------------------------------------------------------


def parse(request: type[Request], arguments: list[str]) -> Request:
    """Return the request that a command line makes. Raises RecipeError with everything that is wrong with it."""
    keys = _keys(request)
    own = {name: each for name, (_, each) in keys.items() if not each.others}
    rest = next((name for name in keys if name not in own), None)
    bare = next((name for name, each in own.items() if each.bare), None)
    given: dict[str, list[str]] = {}
    overrides: list[str] = []
    problems: list[Problem] = []
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            problems.append(_problem(ascii(argument), "bad-format", "is not UTF-8"))
        elif equals and name in own:
            given.setdefault(name, []).append(value)
        elif bare and (not equals or os.path.exists(argument)) and not argument.startswith(tuple(FOREIGN)):
            given.setdefault(bare, []).append(argument)
        elif not equals or name.startswith(tuple(FOREIGN)):
            problems.append(_no_key(argument, arguments[number + 1 : number + 2], own))
        elif rest:
            overrides.append(argument)
        else:
            problems.append(_unknown(argument, own))
    values: dict[str, Any] = {rest: overrides} if rest else {}
    for name, texts in given.items():
        values[name] = _value(name, *keys[name], texts, problems)
    for field in dataclasses.fields(request):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            problems.append(Problem(field.name, "missing-value", f"expected {field.name}={own[field.name].value}", ORIGIN))
    refuse(problems)
    asked = request(**values)
    refuse(asked.problems() if hasattr(asked, "problems") else ())
    return asked


def _keys(request: type) -> dict[str, tuple[Any, Key]]:
    """Return name -> (type, key) of the fields, in order."""
    return {name: get_args(hint) for name, hint in get_type_hints(request, include_extras=True).items()}


def _value(name: str, kind: Any, own: Key, texts: list[str], problems: list[Problem]) -> Any:
    """Return the value of a key that was given, once for each of `texts`; adds to `problems` what is wrong with it."""
    several = get_origin(kind) is list
    if several:
        (kind,) = get_args(kind)
    elif get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    values = []
    for text in texts if several else texts[-1:]:
        try:
            values.append(own.read(text) if own.read else _read(kind, text))
        except (ValueError, OSError) as error:
            code = "missing-value" if not text else "not-a-choice" if get_origin(kind) is Literal else "wrong-type"
            code, expected = ("unreadable", error.strerror) if isinstance(error, OSError) else (code, f"expected {error}")
            problems.append(Problem(name, code, f"got '{_clipped(text)}'; {expected}"))
    return values if several else values[-1] if values else None


def _read(kind: Any, text: str) -> Any:
    """Raises ValueError with what is expected, and OSError for a path that cannot be one."""
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
            pass  # told later, by whoever looks for it
        return Path(text).absolute()
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        raise ValueError(" or ".join(get_args(kind)))
    raise ValueError({bool: "true or false", int: "a whole number, 0 at least", float: "a number above 0"}[kind])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _clipped(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# ---- what is no key -------------------------------------------------------------------------------------------------------


def _problem(argument: str, code: str, message: str) -> Problem:
    return Problem(_clipped(argument), code, message, ORIGIN)


def _unknown(argument: str, own: dict[str, Key]) -> Problem:
    name = argument.partition("=")[0]
    near = difflib.get_close_matches(name, own, 1)
    hint = f"did you mean {near[0]}=? " if near else ""
    there = ", ".join(f"{each}={key.value}" for each, key in own.items())
    return _problem(name, "unknown-key", f"is not a key; {hint}there are: {there}")


def _no_key(argument: str, following: list[str], own: dict[str, Key]) -> Problem:
    """Name the key=value that may be meant by another command's way to say it."""
    option, equals, value = argument.partition("=")
    name = option.lstrip(FOREIGN)
    why = "begins with what no key begins with" if equals else "is not key=value"
    if name == option:
        what = next((each for each in ("recipe", "sweep") if each in own), None)
        meant = f"{what}={_clipped(argument)}" if what else "key=value"
        if what and "." in argument and "/" not in argument and not argument.endswith(".yaml"):  # a dotted key
            meant = f"{_clipped(argument)}=VALUE"
        return _problem(argument, "bad-format", f"{why}; try {meant}")
    name = "recipe" if name in ("config", "config-path", "config-name") and "recipe" in own else name.replace("-", "_")
    if option.startswith("~"):
        value = "null"
    elif not equals:
        is_value = following and "=" not in following[0] and not following[0].startswith(tuple(FOREIGN))
        value = following[0] if is_value else "true"
    return _problem(argument, "bad-format", f"{why}; try {name}={_clipped(value)}")
