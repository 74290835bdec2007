"""Find the program in the answer to a programming task.

The task's style says where the answer has its code:

    blocks        in fenced blocks: the last block that defines the function's name counts, else the last block
    continuation  the text continues the prompt's code, up to the next fence
    open_block    the text begins inside a fenced block, which ends at the next fence

Only the text after the last </think> counts. Blocks of languages other than Python do not count. A last block without a closing
fence counts, since the token limit or a stop string may have cut the answer there.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
import unicodedata
import warnings

from pipeline.environments.environment import THOUGHT_ENDS

STYLES = ("blocks", "continuation", "open_block")
FENCE = "```"
BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
MOST_MARKS = 256  # combining marks in a row
PYTHON = ("", "python", "py", "python3")


def find_code(text: str, style: str = "blocks", name: str = "", prompt_code: str = "") -> str | None:
    """Return the program of an answer, or None if it has none.

    name: the function or class that the program must define; "" if it need not define any. prompt_code: the code in the prompt.
    A block may leave out the imports and functions before the named function, or have only its body.
    """
    text = text.rpartition(THOUGHT_ENDS)[2]
    if style != "blocks":
        continuation = text.partition(FENCE)[0]
        return prompt_code + continuation if continuation.strip() else None
    blocks = [code for language, code in BLOCK.findall(text) if language.strip().lower() in PYTHON and code.strip()]
    if not blocks:
        return _complete(text, name, prompt_code) if name and FENCE not in text and defines(text, name) else None
    defining = [code for code in blocks if name and defines(code, name)]
    return _complete((defining or blocks)[-1], name, prompt_code)


def defines(code: str, name: str) -> bool:
    """Return whether a piece of Python defines a function, a class or a method of a class with this name."""
    if not code.isascii() and _marks_in_a_row(code) > MOST_MARKS:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its strings
            body = ast.parse(textwrap.dedent(code)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = {_name(statement) for statement in body}
    return name in names | {
        _name(member) for statement in body if isinstance(statement, ast.ClassDef) for member in statement.body
    }


def _name(statement: ast.stmt) -> str:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def _complete(code: str, name: str, prompt_code: str) -> str:
    if not prompt_code:
        return textwrap.dedent(code)
    if not defines(code, name):
        return f"{prompt_code.rstrip()}\n{code}" if code[:1] in " \t" else code
    code = textwrap.dedent(code)
    return code if "from __future__" in code else f"{code_before(prompt_code, name)}\n{code}"


def code_before(code: str, name: str) -> str:
    """Return the code before the definition of the function `name`; "" if the code does not define it."""
    definition = re.search(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", code, re.MULTILINE)
    return code[: definition.start()] if definition else ""


def _marks_in_a_row(code: str) -> int:
    """Return the length of the longest run of combining marks. Python's parser sorts them in quadratic time."""
    runs = itertools.groupby(code, lambda character: unicodedata.combining(character) > 0)
    return max((sum(1 for _ in run) for marks, run in runs if marks), default=0)
