"""Find the arguments of a shell script's command without running anything.

`find_command` follows the script as bash would: assignments, expansions, arithmetic, arrays, `if`, `case`, loops and functions.
Other programs do not run, so what a script takes from one (`$(...)`, the status of a command, `read`) is unknown. An unknown
value is a problem only where it reaches an argument that the reader needs; the problem names the variable to set on the
command line, as `NAME=VALUE`. The script's own arguments are `1=VALUE 2=VALUE`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.recipes.translation import shell_grammar, shell_nodes
from launch.recipes.translation.shell_conditions import MARK, Status, status_of
from launch.recipes.translation.shell_nodes import Assignment, Word
from launch.recipes.translation.shell_words import Argument, ShellVariables, Unknown
from pipeline.config import Problem, RecipeError, config_tree

MOST_COMMANDS = 20_000
SUCCEEDS = (":", "true", "echo", "printf", "export", "declare", "local", "readonly", "typeset", "set", "unset", "shift", "cd")
OF_EVERYBODY = ("HOME", "PATH", "USER", "PWD")
"""Variables of the environment that are not private."""
Recognizes = Callable[[list[str]], bool]


@dataclass
class Command:
    """The command that starts the run."""

    words: list[Argument]
    path: Path
    causes: list[Unknown]
    assumed: dict[str, str]  # variables that have a value of `assume`, because the script asks another program for theirs
    read: dict[str, str]  # variables of the environment that the script reads, with their values

    def origin(self, word: str) -> str:
        """Return "file:line" of a word."""
        shown = config_tree.short_path(self.path)
        return f"{shown}:{word.line}" if isinstance(word, Argument) else shown

    @property
    def environment(self) -> dict[str, str]:
        """Value of a variable of the environment -> the value as a recipe writes it, for those that may be private."""
        return {value: f"${{oc.env:{name}}}" for name, value in self.read.items() if name not in OF_EVERYBODY}

    def is_known(self, word: str) -> bool:
        """Return whether a word has no unknown part."""
        return MARK.search(word) is None

    def known_part(self, word: str) -> str:
        """Return a word without its unknown parts."""
        return MARK.sub("", word)

    def problem(self, key: str, word: str) -> Problem | None:
        """Return the problem of a word with an unknown part; None if it has none. key: the key that the word sets."""
        if (match := MARK.search(word)) is None:
            return None
        cause = self.causes[int(match[1])]
        name = cause.variable
        hint = f". Try {name}=VALUE" if name else f". Try {key}=VALUE"
        where = f"{config_tree.short_path(self.path)}:{cause.line}"
        message = f"got a value that only running the script tells: {cause.reason}{hint} on the command line"
        return Problem(key, "missing-value", message, where)


def mentions(text: str, name: str) -> bool:
    """Return whether a script's text reads a variable, or an argument of the script by its number."""
    return re.search(rf"\$\{{?[!#]?{name}(?!\w)", text) is not None


def find_command(
    text: str,
    path: Path,
    recognizes: Recognizes,
    given: Mapping[str, str] = {},
    assume: Mapping[str, str] = {},
    environment: Mapping[str, str] = os.environ,
) -> Command | None:
    """Return the last command of a script that `recognizes` accepts; None if there is none.

    given: variables and, by number, arguments of the script, which its assignments do not change. assume: values of variables
    that would be unknown otherwise. Raises RecipeError for what is not in the grammar, and for a script that does not end.
    """
    run = _ScriptRun(path, dict(given), assume, environment, recognizes=recognizes)
    try:
        run.commands(shell_grammar.parse(text, path))
    except _Exit as exit_:
        run.ended_at = 0 if exit_.succeeded else exit_.line
    except _Loop:
        raise run.fail("`break` or `continue` outside of a loop") from None
    if run.found is None and run.ended_at:
        message = f"the script exits here before its command. Its arguments are given as 1=VALUE 2=VALUE{run.positions()}"
        raise RecipeError(Problem("recipe", "missing-value", message, f"{config_tree.short_path(path)}:{run.ended_at}"))
    if run.found is None and run.hidden:
        cause = run.causes[run.hidden[0]]
        message = f"whether the script reaches its command depends on what only running it tells: {cause.reason}"
        hint = f". Try {cause.variable}=VALUE on the command line" if cause.variable else ""
        raise RecipeError(Problem("recipe", "missing-value", message + hint, f"{config_tree.short_path(path)}:{cause.line}"))
    return None if run.found is None else Command(run.found, path, run.causes, run.assumed, run.read)


class _Exit(Exception):
    """`exit`, or `return` outside of a function."""

    def __init__(self, line: int, succeeded: bool) -> None:
        super().__init__()
        self.line, self.succeeded = line, succeeded


class _Return(Exception):
    """`return` in a function."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status


class _Loop(Exception):
    """`break` or `continue`. levels: of loops that it concerns."""

    def __init__(self, breaks: bool, levels: int) -> None:
        super().__init__()
        self.breaks, self.levels = breaks, levels


@dataclass(kw_only=True)
class _ScriptRun(ShellVariables):
    recognizes: Recognizes
    functions: dict[str, shell_nodes.Command] = field(default_factory=dict)
    found: list[Argument] | None = None
    hidden: list[int] = field(default_factory=list)  # causes of branches that may hold the command
    ended_at: int = 0
    count: int = 0
    depth: int = 0
    locals: list[dict[str, Any]] = field(default_factory=list)  # variables that hid others, of each function that runs

    def positions(self) -> str:
        """Return a text that names the script's arguments that it reads."""
        return f"; it reads {', '.join(f'${number}' for number in sorted(self.asked))}" if self.asked else ""

    # ---- commands ----

    def commands(self, commands: Iterable[shell_nodes.Command]) -> Status:
        status: Status = True
        for command in commands:
            status = self.command(command)
        return status

    def command(self, command: shell_nodes.Command) -> Status:
        self.count, self.line = self.count + 1, command.line
        if self.count > MOST_COMMANDS:
            raise self.fail(f"the script runs more than {MOST_COMMANDS} commands. Try a script without its loop")
        self.depth += 1
        if self.depth > 3 * config_tree.DEEPEST:
            raise self.fail("a function of the script calls itself too often")
        try:
            return getattr(self, f"_{type(command).__name__.lower()}")(command)
        finally:
            self.depth -= 1

    def _simple(self, command: shell_nodes.Simple) -> Status:
        if not command.words:
            for assignment in command.assignments:
                self.assign(assignment)
            return True
        words: list[Argument] = []
        for word in command.words:
            if isinstance(word, Assignment):
                if words and words[0] == "local" and self.locals:
                    self.locals[-1].setdefault(word.name, self.variables.get(word.name))
                if not isinstance(word.value, tuple) or words[0] != "export":
                    self.assign(word)
            else:
                words += self.fields(word)
        self.line = command.line
        if not words:
            return True
        if self.recognizes(list(words)):
            self.found = words
            return True
        return self.builtin(words[0], words[1:])

    def builtin(self, name: str, words: list[Argument]) -> Status:
        """Follow a command of bash itself, or of the script; the status of another program is unknown."""
        if name in self.functions:
            outer, self.arguments = self.arguments, list(words)
            self.locals.append({})
            try:
                return self.command(self.functions[name])
            except _Return as returned:
                return returned.status
            finally:
                self.arguments = outer
                self.variables |= self.locals.pop()
        if name in ("exit", "return"):
            if name == "return" and self.locals:
                raise _Return(
                    self.unknown_status("the status that a function returns")
                    if MARK.search("".join(words))
                    else not words or words[0] == "0"
                )
            raise _Exit(self.line, not words or words[0] == "0")
        if name in ("break", "continue"):
            raise _Loop(name == "break", int(words[0]) if words and words[0].isdigit() else 1)
        if name == "let":
            raise self.fail("`let` is not followed. Try NAME=$((...))")
        if name in ("[", "test"):
            return self.test([word for word in words if not (name == "[" and word == "]")], globs=False)
        if name in ("eval", "exec", "nohup", "command", "builtin"):
            text = " ".join(words)
            return self.commands(shell_grammar.parse(text, self.path)) if name == "eval" else self.builtin_or_found(words)
        if name == "false":
            return False
        if name == "unset":
            for word in words:
                self.variables[word] = None
        elif name == "shift":
            self.arguments = self.arguments[int(words[0]) if words and words[0].isdigit() else 1 :]
        elif name == "set" and "--" in words:
            self.arguments = list(itertools.islice(itertools.dropwhile(lambda word: word != "--", words), 1, None))
        elif name in shell_grammar.DECLARES:
            for word in words if name == "local" and self.locals else ():
                if not word.startswith("-"):
                    variable = word.partition("=")[0]
                    self.locals[-1].setdefault(variable, self.variables.get(variable))
            for word in words:
                if "=" in word:
                    self.set(word.partition("=")[0], word.partition("=")[2])
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for word in words:
                if not word.startswith("-"):
                    self.variables[word] = self.unknown(f"`{name}` sets {word}", word)
        if name in SUCCEEDS:
            return True
        return self.unknown_status(f"the status of `{MARK.sub('?', ' '.join([name, *words]))[:60]}`")

    def builtin_or_found(self, words: list[Argument]) -> Status:
        return self.builtin(words[0], words[1:]) if words else True

    def _testcommand(self, command: shell_nodes.TestCommand) -> Status:
        tokens = [token if isinstance(token, str) else self.word(token, in_test=True) for token in command.tokens]
        operators = {number for number, token in enumerate(command.tokens) if isinstance(token, str)}
        return self.test(tokens, globs=True, operators=operators)

    def _arithmeticcommand(self, command: shell_nodes.ArithmeticCommand) -> Status:
        text = self.word(command.expression)
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|[-+*/%]?=(?!=))\s*(.*)", text, re.DOTALL)
        if match is None:
            return status_of(self.arithmetic(text))
        name, sign, value = match.groups()
        expression = value if sign == "=" else f"{name} {sign[0]} ({value or '1'})"
        self.set(name, result := self.arithmetic(expression))
        return status_of(result)

    def _andor(self, command: shell_nodes.AndOr) -> Status:
        left = self.command(command.left)
        if isinstance(left, bool):
            return self.command(command.right) if left is (command.operator == "&&") else left
        if _runs_programs_only(command.left):  # `mkdir -p folder && train` is written for a mkdir that succeeds
            return self.command(command.right) if command.operator == "&&" else left
        self.hide(left, [command.right])
        return left

    def _negation(self, command: shell_nodes.Negation) -> Status:
        status = self.command(command.command)
        return not status if isinstance(status, bool) else status

    def _group(self, command: shell_nodes.Group) -> Status:
        if not (command.is_subshell or command.is_pipeline):
            return self.commands(command.commands)
        before = dict(self.variables)
        try:
            return self.commands(command.commands)
        except _Exit as ended:
            return ended.succeeded
        finally:
            self.variables = before

    def _if(self, command: shell_nodes.If) -> Status:
        for number, (condition, commands) in enumerate(command.branches):
            status = self.commands(condition)
            if not isinstance(status, bool):
                self.hide(status, [one for _, rest in command.branches[number:] for one in rest])
                return status
            if status:
                return self.commands(commands)
        return True

    def _casecommand(self, command: shell_nodes.CaseCommand) -> Status:
        subject = self.word(command.subject, in_test=True)
        if match := MARK.search(subject):
            self.hide(int(match[1]) + 2, [one for _, commands in command.branches for one in commands])
            return int(match[1]) + 2
        for patterns, commands in command.branches:
            if any(re.fullmatch(self.pattern(pattern), subject, re.DOTALL) for pattern in patterns):
                return self.commands(commands)
        return True

    def _for(self, command: shell_nodes.For) -> Status:
        items = self.arguments if command.words is None else [item for word in command.words for item in self.fields(word)]
        for item in list(items):
            if match := MARK.search(item):
                self.hide(int(match[1]) + 2, command.commands)
                continue
            self.set(command.name, item)
            if not self.repeats(command.commands):
                break
        return True

    def repeats(self, commands: Iterable[shell_nodes.Command]) -> bool:
        """Run the commands of a loop once, and return whether the loop goes on."""
        try:
            self.commands(commands)
        except _Loop as loop:
            if loop.levels > 1:
                raise _Loop(loop.breaks, loop.levels - 1) from None
            return not loop.breaks
        return True

    def _while(self, command: shell_nodes.While) -> Status:
        while True:
            status = self.commands(command.condition)
            if not isinstance(status, bool):
                self.hide(status, command.commands)
                return status
            if status is command.is_until or not self.repeats(command.commands):
                return True

    def _functiondefinition(self, command: shell_nodes.FunctionDefinition) -> Status:
        self.functions[command.name] = command.body
        return True

    def hide(self, status: int, commands: Iterable[shell_nodes.Command]) -> None:
        """Make the variables unknown that commands assign which may or may not run. status: the unknown condition's."""
        cause = self.causes[status - 2]
        for node in _nodes(tuple(commands)):
            if isinstance(node, Assignment):
                reason = f"whether it is set in line {node.line} depends on {cause.reason}"
                self.causes.append(Unknown(cause.variable or node.name, cause.line, reason))
                if node.name not in self.given:
                    self.variables[node.name] = f"\ue000{len(self.causes) - 1}\ue001"
            elif isinstance(node, shell_nodes.Simple) and node.words:
                words = [self.word(word) for word in node.words if isinstance(word, Word)]
                if self.recognizes(words):
                    self.hidden.append(status - 2)


def _runs_programs_only(command: shell_nodes.Command) -> bool:
    """Return whether a command runs programs other than tests, so that a script counts on their success."""
    if isinstance(command, shell_nodes.AndOr):
        return _runs_programs_only(command.right)
    return isinstance(command, shell_nodes.Simple | shell_nodes.Group) and not (
        isinstance(command, shell_nodes.Simple)
        and command.words
        and isinstance(command.words[0], Word)
        and command.words[0].literal in ("[", "test")
    )


def _nodes(node: Any) -> Iterator[Any]:
    """Yield the commands and assignments inside a command, or a tuple of commands."""
    if isinstance(node, tuple):
        yield from itertools.chain.from_iterable(map(_nodes, node))
    elif not isinstance(node, str | bool | int | Word | type(None)):
        yield node
        for name in getattr(node, "__dataclass_fields__", ()):
            yield from _nodes(getattr(node, name))
