"""The commands and words of a shell script, as `shell_grammar.py` parses them and `shell_script.py` evaluates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# ---- words ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Characters as they are."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class ParameterExpansion:
    """`$NAME` or `${NAME<operator><argument>}`."""

    name: str
    quoted: bool
    index: str = ""  # of an array: "@", "*" or a number
    operator: str = ""  # ":-", "%%" and the like; "length" for `${#NAME}`, "indirect" for `${!NAME}`
    argument: Word | None = None


@dataclass(frozen=True)
class Arithmetic:
    """`$((expression))`."""

    expression: Word
    quoted: bool


@dataclass(frozen=True)
class Substitution:
    """`$(command)` or one in backticks, which nothing runs."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """Parts that are joined. An empty quoted text makes an empty word."""

    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """Return the text of a word without quotes and expansions; None for other words."""
        plain = [part.text for part in self.parts if isinstance(part, Text) and not part.quoted]
        return "".join(plain) if len(plain) == len(self.parts) else None


Part: TypeAlias = Text | ParameterExpansion | Arithmetic | Substitution


# ---- commands ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, `NAME+=value`, `NAME=(words)` or `NAME[index]=value`."""

    name: str
    value: Word | tuple[Word, ...]
    appends: bool
    line: int
    index: str = ""


@dataclass(frozen=True)
class Simple:
    """Assignments, then a command's words; redirections are left out."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]  # an assignment is an argument of `export` and the like
    line: int


@dataclass(frozen=True)
class TestCommand:
    """`[[ tokens ]]`; a token is a word, or an operator as a string."""

    tokens: tuple[Word | str, ...]
    line: int


@dataclass(frozen=True)
class ArithmeticCommand:
    """`(( expression ))`."""

    expression: Word
    line: int


@dataclass(frozen=True)
class AndOr:
    """`left && right` or `left || right`."""

    left: Command
    operator: str
    right: Command
    line: int


@dataclass(frozen=True)
class Negation:
    """`! command`."""

    command: Command
    line: int


@dataclass(frozen=True)
class Group:
    """`{ commands; }`, `( commands )`, or the commands of a pipeline."""

    commands: tuple[Command, ...]
    line: int
    is_subshell: bool = False
    is_pipeline: bool = False


@dataclass(frozen=True)
class If:
    """`if` with its `elif`s: (condition, commands) in order; the condition of `else` is empty."""

    branches: tuple[tuple[tuple[Command, ...], tuple[Command, ...]], ...]
    line: int


@dataclass(frozen=True)
class CaseCommand:
    """`case subject in patterns) commands ;; ...`."""

    subject: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Command, ...]], ...]
    line: int


@dataclass(frozen=True)
class For:
    """`for name in words; do commands; done`; words are None for the script's own arguments."""

    name: str
    words: tuple[Word, ...] | None
    commands: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class While:
    """`while condition; do commands; done`, or `until`."""

    condition: tuple[Command, ...]
    commands: tuple[Command, ...]
    is_until: bool
    line: int


@dataclass(frozen=True)
class FunctionDefinition:
    """`name() { commands; }`."""

    name: str
    body: Command
    line: int


Command: TypeAlias = (
    "Simple | TestCommand | ArithmeticCommand | AndOr | Negation | Group | If | CaseCommand | For | While | FunctionDefinition"
)
