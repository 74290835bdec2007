"""Parse a shell script into commands, as far as scripts that start a training run use the language.

The grammar is that of bash without job control: simple commands, pipelines, `&&` and `||`, groups and subshells, `if`, `case`,
`for`, `while`, `until`, functions, `[[ ]]`, `(( ))`, arrays, here-documents, and the expansions `$NAME`, `${...}`, `$(...)` and
`$((...))`. Nothing is run. `shell_script.py` evaluates the result.
"""

from __future__ import annotations

import bisect
import re
from pathlib import Path

from launch.recipes.translation.shell_nodes import (
    AndOr,
    Arithmetic,
    ArithmeticCommand,
    Assignment,
    CaseCommand,
    Command,
    For,
    FunctionDefinition,
    Group,
    If,
    Negation,
    ParameterExpansion,
    Part,
    Simple,
    Substitution,
    TestCommand,
    Text,
    While,
    Word,
)
from pipeline.config import Problem, RecipeError, config_tree

RESERVED = {"then", "elif", "else", "fi", "do", "done", "esac", "in", "}", "]]"}
DECLARES = ("export", "declare", "local", "readonly", "typeset")
REDIRECTION = re.compile(r"(\d*|\{\w+\})(&>>|&>|>>|>&|>\||<<<|<<-|<<|<&|<>|>|<)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\s]*)\])?(\+?)=")
PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))")
OPERATORS = (":-", ":=", ":?", ":+", "##", "%%", "//", "^^", ",,", "-", "=", "?", "+", "#", "%", "/", "^", ",", ":")
METACHARACTERS = " \t\n;&|<>()"


def parse(text: str, file: Path) -> tuple[Command, ...]:
    """Return the commands of a script. Raises RecipeError with file and line for what is not in the grammar."""
    return _Parser(text, file).script()


class _Parser:
    def __init__(self, text: str, file: Path) -> None:
        self.text, self.file, self.at = text.replace("\r\n", "\n"), file, 0
        self.line_ends = [match.start() for match in re.finditer("\n", self.text)]
        self.here_documents: list[tuple[str, bool]] = []  # delimiters that begin at the next line, and whether tabs go
        self.depth = 0

    @property
    def line(self) -> int:
        return bisect.bisect_left(self.line_ends, self.at) + 1

    def fail(self, message: str) -> RecipeError:
        return RecipeError(Problem("recipe", "bad-format", message, f"{config_tree.short_path(self.file)}:{self.line}"))

    # ---- characters ----

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def expect(self, text: str) -> None:
        self.blanks()
        if not self.take(text):
            got = self.text[self.at : self.at + 20].partition("\n")[0]
            raise self.fail(f"got '{got}'; expected '{text}', as bash does")

    def blanks(self) -> None:
        """Skip blanks, continued lines and comments, but no end of line."""
        while self.at < len(self.text):
            if self.peek("\\\n"):
                self.at += 2
            elif self.text[self.at] in " \t":
                self.at += 1
            elif self.peek("#") and (self.at == 0 or self.text[self.at - 1] in METACHARACTERS):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def newline(self) -> bool:
        """Take an end of line, with the here-documents that follow it."""
        if not self.take("\n"):
            return False
        for delimiter, strips in self.here_documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (line.lstrip("\t") if strips else line) == delimiter:
                    break
        self.here_documents.clear()
        return True

    def separators(self) -> None:
        self.blanks()
        while self.newline() or (self.peek(";") and not self.peek(";;") and self.take(";")) or self.take_background():
            self.blanks()

    def take_background(self) -> bool:
        return self.peek("&") and not self.peek("&&") and not self.peek("&>") and self.take("&")

    def reserved(self, *words: str) -> str:
        """Return the reserved word that comes next, if it is one of these."""
        self.blanks()
        for word in words:
            end = self.at + len(word)
            if self.peek(word) and (end >= len(self.text) or self.text[end] in METACHARACTERS):
                return word
        return ""

    def take_reserved(self, *words: str) -> str:
        word = self.reserved(*words)
        self.at += len(word)
        return word

    # ---- commands ----

    def script(self) -> tuple[Command, ...]:
        commands = self.commands()
        if self.at < len(self.text):
            raise self.fail(f"got '{self.text[self.at : self.at + 20].partition(chr(10))[0]}'; expected a command")
        return commands

    def commands(self, *until: str) -> tuple[Command, ...]:
        found: list[Command] = []
        self.depth += 1
        if self.depth > config_tree.DEEPEST:
            raise self.fail(f"got commands nested more than {config_tree.DEEPEST} levels deep")
        while True:
            self.separators()
            if self.at >= len(self.text) or self.peek(")") or self.peek(";;") or (until and self.reserved(*until)):
                self.depth -= 1
                return tuple(found)
            found.append(self.and_or())

    def and_or(self) -> Command:
        left = self.pipeline()
        while True:
            self.blanks()
            operator = next((op for op in ("&&", "||") if self.peek(op)), "")
            if not operator:
                return left
            line = self.line
            self.at += 2
            self.lines()
            left = AndOr(left, operator, self.pipeline(), line)

    def lines(self) -> None:
        self.blanks()
        while self.newline():
            self.blanks()

    def pipeline(self) -> Command:
        line = self.line
        if self.take_reserved("!"):
            return Negation(self.pipeline(), line)
        self.take_reserved("time")
        commands = [self.command()]
        self.blanks()
        while self.peek("|") and not self.peek("||"):
            self.at += 2 if self.peek("|&") else 1
            self.lines()
            commands.append(self.command())
            self.blanks()
        return commands[0] if len(commands) == 1 else Group(tuple(commands), line, is_pipeline=True)

    def command(self) -> Command:
        self.blanks()
        compound = self.compound()
        if compound is None:
            if word := self.reserved(*RESERVED):
                raise self.fail(f"got '{word}'; expected a command")
            return self.simple()
        while self.redirection():
            self.blanks()
        return compound

    def compound(self) -> Command | None:
        line = self.line
        if self.take("(("):
            return ArithmeticCommand(self.arithmetic(), line)
        if self.take("("):
            commands = self.commands()
            self.expect(")")
            return Group(commands, line, is_subshell=True)
        if self.take_reserved("{"):
            commands = self.commands("}")
            self.expect("}")
            return Group(commands, line)
        if self.take_reserved("[["):
            return self.test(line)
        if self.take_reserved("if"):
            return self.if_(line)
        if self.take_reserved("case"):
            return self.case(line)
        if self.take_reserved("for"):
            return self.for_(line)
        if word := self.take_reserved("while", "until"):
            condition = self.commands("do")
            self.expect("do")
            commands = self.commands("done")
            self.expect("done")
            return While(condition, commands, word == "until", line)
        match = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))").match(
            self.text, self.at
        )
        if match is None:
            return None
        self.at = match.end()
        self.lines()
        return FunctionDefinition(match[1] or match[2], self.command(), line)

    def if_(self, line: int) -> If:
        branches, word = [], "if"
        while word != "fi":
            condition = () if word == "else" else self.commands("then")
            if word != "else":
                self.expect("then")
            branches.append((condition, self.commands("elif", "else", "fi")))
            if not (word := self.take_reserved("elif", "else", "fi")):
                raise self.fail("got the end of the script; expected 'fi'")
        return If(tuple(branches), line)

    def case(self, line: int) -> CaseCommand:
        self.blanks()
        subject, branches = self.word(), []
        self.lines()
        self.expect("in")
        while True:
            self.lines()
            if self.take_reserved("esac"):
                return CaseCommand(subject, tuple(branches), line)
            self.take("(")
            patterns = []
            while not patterns or self.take("|"):
                self.blanks()
                patterns.append(self.word())
                self.blanks()
            self.expect(")")
            branches.append((tuple(patterns), self.commands("esac")))
            self.blanks()
            if self.take(";;"):
                self.take("&")

    def for_(self, line: int) -> For:
        self.blanks()
        if self.peek("(("):
            raise self.fail("got a for loop over numbers, which is not evaluated. Try a script without it")
        match = re.compile(r"[A-Za-z_]\w*").match(self.text, self.at)
        if match is None:
            raise self.fail("got a for loop without a name")
        self.at = match.end()
        self.lines()
        words: list[Word] | None = None
        if self.take_reserved("in"):
            words = []
            self.blanks()
            while self.at < len(self.text) and self.text[self.at] not in ";\n":
                words.append(self.word())
                self.blanks()
        self.separators()
        self.expect("do")
        commands = self.commands("done")
        self.expect("done")
        return For(match[0], None if words is None else tuple(words), commands, line)

    def test(self, line: int) -> TestCommand:
        tokens: list[Word | str] = []
        while not self.take_reserved("]]"):
            if self.at >= len(self.text):
                raise self.fail("got the end of the script; expected ']]'")
            if self.newline():
                continue
            operator = next((op for op in ("&&", "||", "(", ")", "<", ">") if self.peek(op)), "")
            if operator:
                self.at += len(operator)
                tokens.append(operator)
            elif tokens and isinstance(last := tokens[-1], Word) and last.literal == "=~":
                tokens.append(self.word(ends=" \t\n"))
            else:
                tokens.append(self.word())
        return TestCommand(tuple(tokens), line)

    def simple(self) -> Simple:
        line = self.line
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        while True:
            self.blanks()
            if self.redirection():
                continue
            if self.at >= len(self.text) or self.text[self.at] in METACHARACTERS:
                break
            declares = bool(words) and isinstance(words[0], Word) and words[0].literal in DECLARES
            if (not words or declares) and (assignment := self.assignment()):
                (words if words else assignments).append(assignment)
            else:
                words.append(self.word())
        if not words and not assignments and (self.at >= len(self.text) or not self.peek("\n")):
            got = self.text[self.at : self.at + 20].partition("\n")[0]
            raise self.fail(f"got '{got}'; expected a command")
        return Simple(tuple(assignments), tuple(words), line)

    def assignment(self) -> Assignment | None:
        match = ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return None
        line, self.at = self.line, match.end()
        if not self.take("("):
            return Assignment(match[1], self.word(may_be_empty=True), bool(match[3]), line, match[2] or "")
        words: list[Word] = []
        self.lines()
        while not self.take(")"):
            if self.at >= len(self.text):
                raise self.fail(f"got the end of the script; expected ')' after {match[1]}=(")
            words.append(self.word())
            self.lines()
        return Assignment(match[1], tuple(words), bool(match[3]), line)

    def redirection(self) -> bool:
        match = REDIRECTION.match(self.text, self.at)
        if match is None or (self.peek("<(") or self.peek(">(")):
            return False
        self.at = match.end()
        self.blanks()
        target = self.word()
        if match[2] in ("<<", "<<-"):
            delimiter = "".join(part.text for part in target.parts if isinstance(part, Text))
            self.here_documents.append((delimiter, match[2] == "<<-"))
        return True

    # ---- words ----

    def word(self, ends: str = METACHARACTERS, may_be_empty: bool = False) -> Word:
        line, start = self.line, self.at
        parts = self.parts(ends)
        if self.at == start and not may_be_empty:
            got = self.text[self.at : self.at + 20].partition("\n")[0]
            raise self.fail(f"got '{got}'; expected a word")
        return Word(parts, line)

    def parts(self, ends: str, in_quotes: bool = False) -> tuple[Part, ...]:
        """Parse up to one of the characters `ends`. in_quotes: inside double quotes."""
        found: list[Part] = []
        while self.at < len(self.text) and self.text[self.at] not in ends:
            character = self.text[self.at]
            if character == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if following != "\n":
                    kept = in_quotes and following not in '"\\$`'
                    found.append(Text(f"\\{following}" if kept else following, True))
            elif character == "'" and not in_quotes:
                found.append(Text(self.up_to("'"), True))
            elif character == '"':
                self.at += 1
                found += self.parts('"', True) or (Text("", True),)
                if not self.take('"'):
                    raise self.fail('got the end of the script; expected a closing "')
            elif character == "`":
                found.append(Substitution(self.up_to("`"), in_quotes))
            elif self.peek("$'") and not in_quotes:
                self.at += 1
                found.append(Text(self.up_to("'").encode().decode("unicode_escape", errors="replace"), True))
            elif character == "$":
                found.append(self.dollar(in_quotes))
            else:
                self.at += 1
                found.append(Text(character, in_quotes))
        return _joined(found)

    def up_to(self, end: str) -> str:
        start = self.at + 1
        stop = self.text.find(end, start)
        if stop < 0:
            raise self.fail(f"got the end of the script; expected a closing {end}")
        self.at = stop + 1
        return self.text[start:stop]

    def dollar(self, quoted: bool) -> Part:
        if self.take("$(("):
            return Arithmetic(self.arithmetic(), quoted)
        if self.take("$("):
            start, depth = self.at, 1
            while depth:
                if self.at >= len(self.text):
                    raise self.fail("got the end of the script; expected a closing )")
                if self.text[self.at] in "'\"":
                    self.skip_quoted()
                    continue
                depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
                self.at += 1
            return Substitution(self.text[start : self.at - 1], quoted)
        if self.take("${"):
            return self.braces(quoted)
        match = PARAMETER.match(self.text, self.at + 1)
        self.at += 1
        if match is None:
            return Text("$", quoted)
        name = match[0][0] if match[0][0].isdigit() else match[0]
        self.at += len(name)
        return ParameterExpansion(name, quoted)

    def skip_quoted(self) -> None:
        quote = self.text[self.at]
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != quote:
            self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
        self.at += 1

    def braces(self, quoted: bool) -> ParameterExpansion:
        operator = ""
        if self.peek("#") and not self.peek("#}"):
            self.at, operator = self.at + 1, "length"
        elif self.peek("!"):
            self.at, operator = self.at + 1, "indirect"
        match = PARAMETER.match(self.text, self.at)
        if match is None:
            raise self.fail("got ${ without a name")
        self.at = match.end()
        index = self.up_to("]") if self.peek("[") else ""
        argument = None
        if not self.peek("}"):
            sign = next((op for op in OPERATORS if self.take(op)), None)
            if sign is None:
                raise self.fail(f"got ${{{match[0]}{self.text[self.at : self.at + 5]}; expected an operator of bash")
            operator = sign
            argument = Word(self.parts("}", quoted), self.line)
        if not self.take("}"):
            raise self.fail("got the end of the script; expected a closing }")
        return ParameterExpansion(match[0], quoted, index, operator, argument)

    def arithmetic(self) -> Word:
        """Parse the expression up to `))`."""
        line, parts = self.line, []
        depth = 0
        while not (depth == 0 and self.peek("))")):
            if self.at >= len(self.text):
                raise self.fail("got the end of the script; expected a closing ))")
            if self.peek("$"):
                parts.append(self.dollar(True))
                continue
            character = self.text[self.at]
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character not in '"\\':
                parts.append(Text(character, True))
            self.at += 1
        self.at += 2
        return Word(_joined(parts), line)


def _joined(
    parts: list[Part],
) -> tuple[Part, ...]:
    """Return the parts with adjacent texts of one kind as one text."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Text) and isinstance(last, Text) and part.quoted == last.quoted:
            found[-1] = Text(last.text + part.text, part.quoted)
        else:
            found.append(part)
    return tuple(found)
