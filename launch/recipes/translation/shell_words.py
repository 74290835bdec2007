"""Variables and words of a shell script, with bash's expansions, as far as they are known without running a program."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.recipes.translation import shell_grammar, shell_nodes
from launch.recipes.translation.shell_conditions import MARK, Condition, Status, compute, glob_pattern, status_of
from launch.recipes.translation.shell_nodes import Assignment, ParameterExpansion, Text, Word
from pipeline.config import Problem, RecipeError, config_tree

LONGEST = 1 << 20
"""Characters of a value."""


class Argument(str):
    """A word of a command, with the line of the script that has it."""

    line: int

    def __new__(cls, text: str, line: int) -> Argument:
        """Return the word `text` of line `line`."""
        word = super().__new__(cls, text)
        word.line = line
        return word


@dataclass(frozen=True)
class Unknown:
    """Why a value is unknown."""

    variable: str  # the variable to set; empty if no variable holds the value
    line: int
    reason: str


@dataclass
class ShellVariables:
    """The variables of a script that is followed, and the values of its words. Unknown parts of a value are marks (MARK)."""

    path: Path
    given: dict[str, str]  # variables and arguments that the command line sets
    assume: Mapping[str, str]  # values of variables that would be unknown
    environment: Mapping[str, str]
    variables: dict[str, Any] = field(default_factory=dict)  # str, or a list of Arguments
    causes: list[Unknown] = field(default_factory=list)
    assumed: dict[str, str] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # the numbers of the script's arguments that it reads

    def __post_init__(self) -> None:
        numbers = sorted(int(name) for name in self.given if name.isdigit() and name != "0")
        self.arguments = [self.given[str(number)] for number in numbers]
        self.variables |= {"BASH_SOURCE": str(self.path.absolute()), "PWD": os.getcwd()}
        self.line = 0
        self.setting = ""  # the variable whose value is evaluated

    def unknown(self, reason: str, variable: str = "") -> str:
        """Return an unknown value. variable: the one to set; else the variable that is being assigned."""
        self.causes.append(Unknown(variable or self.setting, self.line, reason))
        return f"\ue000{len(self.causes) - 1}\ue001"

    def unknown_status(self, reason: str) -> Status:
        """Return an unknown status."""
        return status_of(self.unknown(reason))

    def fail(self, message: str) -> RecipeError:
        """Return an error with the line of the command."""
        return RecipeError(Problem("recipe", "bad-format", message, f"{config_tree.short_path(self.path)}:{self.line}"))

    # ---- variables ------------------------------------------------------------------------------------------------------

    def set(self, name: str, value: str | list[Argument]) -> None:
        """Set a variable, unless the command line sets it."""
        if name in self.given:
            return
        if isinstance(value, str) and MARK.search(value) and name in self.assume:
            value = self.assumed[name] = self.assume[name]
        if len(value) > LONGEST:
            raise self.fail(f"the value of {name} has more than {LONGEST} characters")
        self.variables[name] = value

    def assign(self, one: Assignment) -> None:
        """Evaluate an assignment."""
        self.line, outer, self.setting = one.line, self.setting, one.name
        try:
            if isinstance(one.value, tuple):
                words = [item for word in one.value for item in self.fields(word)]
                before = self.values(one.name) if one.appends else []
                self.set(one.name, [*before, *words])
            elif one.index:
                items = self.values(one.name)
                place = int(number) if (number := self.arithmetic(one.index)).isdigit() else 0
                items += [Argument("", one.line)] * (min(place, 1000) + 1 - len(items))
                items[min(place, 1000)] = Argument(self.word(one.value), one.line)
                self.set(one.name, items)
            else:
                value = self.word(one.value)
                before = self.lookup(one.name) if one.appends else ""
                self.set(one.name, (before or "") + value)
        finally:
            self.setting = outer

    def lookup(self, name: str) -> str | None:
        """Return the value of a variable, of an array its first item; None if it is not set."""
        if name.isdigit():
            return self.argument(int(name))
        if name in self.given:
            return self.given[name]
        if name in self.variables:
            value = self.variables[name]
            return (value[0] if value else None) if isinstance(value, list) else value
        if (value := self.environment.get(name)) is not None:
            self.read[name] = value
        return value

    def argument(self, number: int) -> str | None:
        """Return an argument of the script, of 0 its path; None if it is not given."""
        if number == 0:
            return str(self.path)
        self.asked.add(number)
        return self.arguments[number - 1] if number <= len(self.arguments) else None

    def values(self, name: str) -> list[Argument]:
        """Return the items of an array, or the value as its one item."""
        value = self.variables.get(name)
        if isinstance(value, list) and name not in self.given:
            return list(value)
        text = self.lookup(name)
        return [] if text is None else [Argument(text, self.line)]

    # ---- words ----------------------------------------------------------------------------------------------------------

    def fields(self, word: Word) -> list[Argument]:
        """Return the words that a word expands to, by bash's splitting of what is not quoted; patterns of files stay."""
        self.line = word.line
        found: list[str] = []
        begun = False  # whether the last item of `found` goes on
        for part in word.parts:
            if (
                isinstance(part, ParameterExpansion)
                and (part.index in ("@", "*") or part.name in ("@", "*"))
                and not part.operator
            ):
                items = list(self.values(part.name) if part.index else self.arguments)
                if (part.index or part.name) == "*" and part.quoted:
                    items = [Argument(" ".join(items), word.line)]
                if not part.quoted:
                    items = [Argument(piece, getattr(item, "line", word.line)) for item in items for piece in item.split()]
                if len(word.parts) == 1:
                    return [item if isinstance(item, Argument) else Argument(item, word.line) for item in items]
                pieces: list[str] = [str(item) for item in items]
            elif part.quoted or isinstance(part, Text):
                pieces = [self.with_home(self.part(part), part is word.parts[0] and not part.quoted)]
            elif self.is_unset(part) and len(word.parts) == 1:
                return []
            else:
                text = self.part(part)
                if text[:1].isspace():
                    begun = False
                pieces = text.split()
                if text[-1:].isspace() and pieces:
                    pieces.append("")
            for number, piece in enumerate(pieces):
                if number == 0 and begun:
                    found[-1] += piece
                else:
                    found.append(piece)
                begun = True
            if pieces and pieces[-1] == "" and not part.quoted and not isinstance(part, Text):
                found.pop()
                begun = False
        return [Argument(text, word.line) for text in found]

    def is_unset(self, part: Any) -> bool:
        """Return whether a part is the bare name of a variable that is not set."""
        if not isinstance(part, ParameterExpansion) or part.operator or part.name in "@*#?$!-":
            return False
        return self.lookup(part.name) is None

    def word(self, word: Word, in_test: bool = False) -> str:
        """Return the text of a word without splitting it. in_test: a variable that is not set is empty, not unknown."""
        self.line = word.line or self.line
        text = "".join(self.part(part, in_test) for part in word.parts)
        return self.with_home(text, bool(word.parts) and not word.parts[0].quoted)

    def with_home(self, text: str, starts_unquoted: bool) -> str:
        """Return a text with the home folder for `~`, also after `NAME=`."""
        if not starts_unquoted or "~" not in text:
            return text
        return re.sub(r"^([A-Za-z_]\w*=)?~(?=/|$)", lambda match: f"{match[1] or ''}{self.lookup('HOME') or '~'}", text)

    def part(self, part: Any, in_test: bool = False) -> str:
        """Return the text of a part of a word."""
        if isinstance(part, Text):
            return part.text
        if isinstance(part, shell_nodes.Arithmetic):
            return self.arithmetic(self.word(part.expression))
        if isinstance(part, shell_nodes.Substitution):
            known = self.output(shell_grammar.parse(part.text, self.path))
            return known if known is not None else self.unknown(f"`$({' '.join(part.text.split())[:60]})`")
        return self.parameter(part, in_test)

    def output(self, commands: tuple[shell_nodes.Command, ...]) -> str | None:
        """Return the output of commands that name a path, such as `cd "$(dirname "$0")/.." && pwd`; None for others."""
        line, folder = self.line, self.variables["PWD"]
        if len(commands) == 1 and isinstance(both := commands[0], shell_nodes.AndOr) and both.operator == "&&":
            commands = (both.left, both.right)
        simple = [one for one in commands if isinstance(one, shell_nodes.Simple)]
        fields = [self.fields(word) for one in simple for word in one.words if isinstance(word, Word)]
        self.line = line
        texts = [item for one in fields for item in one if item != "--"]
        if any(map(MARK.search, texts)) or not texts:
            return None
        if texts[0] == "cd" and texts[2:] == ["pwd"]:
            return os.path.abspath(os.path.join(folder, texts[1]))
        if texts == ["pwd"]:
            return folder
        name, *rest = texts
        if name == "dirname" and len(rest) == 1:
            return os.path.dirname(rest[0]) or "."
        if name == "basename" and len(rest) in (1, 2):
            return os.path.basename(rest[0]).removesuffix("".join(rest[1:]))
        return os.path.abspath(rest[0]) if name == "realpath" and len(rest) == 1 else None

    def parameter(self, part: ParameterExpansion, in_test: bool) -> str:
        """Return the value of `$NAME` or `${NAME...}`."""
        name, sign = part.name, part.operator
        if name in ("@", "*") or part.index in ("@", "*"):
            items = self.values(name) if part.index else self.arguments
            return str(len(items)) if sign == "length" else " ".join(items)
        if name == "#":
            self.asked |= {len(self.arguments) + 1}
            return str(len(self.arguments))
        if name in "?$!-":
            return self.unknown(f"`${name}`")
        if sign == "indirect":
            return self.parameter(ParameterExpansion(self.lookup(name) or "_", part.quoted), in_test)
        if part.index:
            items, number = self.values(name), self.arithmetic(part.index)
            value = items[int(number)] if number.lstrip("-").isdigit() and -len(items) <= int(number) < len(items) else None
        else:
            value = self.lookup(name)
        if sign in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
            return self.default(part, value, in_test)
        if value is None:
            return "" if in_test or (name.isdigit() and sign) else self.unset(name)
        if sign == "length":
            return str(len(value))
        return value if not sign or MARK.search(value) else self.edited(sign, value, part.argument)

    def unset(self, name: str) -> str:
        """Return the value of a variable that is not set."""
        if name == self.setting:  # A="$A b" appends to what may be nothing
            return ""
        what = f"${name}, an argument of the script, is not given" if name.isdigit() else f"{name} is not set"
        return self.unknown(what, name)

    def default(self, part: ParameterExpansion, value: str | None, in_test: bool) -> str:
        """Return the value of `${NAME:-...}` and the like. value: of the variable; None if it is not set."""
        sign = part.operator
        is_set = value is not None and (value != "" or not sign.startswith(":"))
        outer, self.setting = self.setting, self.setting or part.name
        try:
            argument = self.word(part.argument, in_test) if part.argument and is_set is (sign[-1] == "+") else ""
        finally:
            self.setting = outer
        if sign[-1] == "+":
            return argument if is_set else ""
        if is_set:
            return value or ""
        if sign[-1] == "?":
            return self.unknown(f"{part.name} is not set ({argument})", part.name)
        if MARK.search(argument) and part.name in self.assume:
            argument = self.assumed[part.name] = self.assume[part.name]
        if sign[-1] == "=":
            self.set(part.name, argument)
        return argument

    def edited(self, sign: str, value: str, argument: Word | None) -> str:
        """Return a value without a prefix or suffix, with replacements, in another case, or a part of it."""
        if sign in ("^", "^^", ",", ",,"):
            change = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
        if sign == ":":
            bounds = [self.arithmetic(text) for text in self.word(argument or Word((), 0)).split(":")]
            if not all(re.fullmatch(r"-?\d+", bound) for bound in bounds):
                return self.unknown(f"a part of '{value[:20]}'")
            start = int(bounds[0]) if int(bounds[0]) >= 0 else max(0, len(value) + int(bounds[0]))
            rest = value[start:]
            return rest[: int(bounds[1])] if len(bounds) > 1 else rest
        if sign in ("/", "//"):
            text, _, new = self.word(argument or Word((), 0)).partition("/")
            return re.sub(glob_pattern(text), lambda _: new, value, count=0 if sign == "//" else 1)
        pattern = self.pattern(argument or Word((), 0))
        cuts: Iterable[int] = range(len(value) + 1)
        from_start = sign[0] == "#"
        longest = len(sign) == 2
        if longest is from_start:
            cuts = reversed(range(len(value) + 1))
        for cut in cuts:
            piece, rest = (value[:cut], value[cut:]) if from_start else (value[cut:], value[:cut])
            if re.fullmatch(pattern, piece, re.DOTALL):
                return rest
        return value

    def pattern(self, word: Word) -> str:
        """Return a regular expression for a pattern of bash, in which quoted characters stand for themselves."""
        texts = [(self.part(part, True), part.quoted) for part in word.parts]
        return "".join(re.escape(text) if quoted else glob_pattern(text) for text, quoted in texts)

    # ---- tests and arithmetic -------------------------------------------------------------------------------------------

    def test(self, tokens: list[str], globs: bool, operators: set[int] | None = None) -> Status:
        """Evaluate `[ ... ]`, or `[[ ... ]]` with globs=True. operators: the indices of tokens that are operators."""
        return Condition(self, tokens, globs, operators).evaluate()

    def arithmetic(self, text: str) -> str:
        """Return the value of an expression of whole numbers."""
        if match := MARK.search(text):
            return match[0]
        names: dict[str, str] = {}
        for name in set(re.findall(r"(?<![\w$])[A-Za-z_]\w*", text)) - {"x"}:
            value = self.lookup(name)
            names[name] = "0" if value in (None, "") else str(value)
            if match := MARK.search(names[name]):
                return match[0]
        try:
            return str(compute(text, names))
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
            raise self.fail(f"got (({text.strip()[:60]})); expected an expression of whole numbers") from None
