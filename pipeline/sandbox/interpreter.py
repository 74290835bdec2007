"""The interpreter that a tool talks to, from inside the sandbox: names stay from one piece of code to the next.

Reads code and answers with three texts: what was printed; the value of a last expression; what was raised. Code is four bytes
of length and UTF-8, an answer ANSWER and UTF-8. What the code writes to descriptor 1 past Python is lost. Nothing here is a
guard: whatever runs here can answer what it likes.

It is copied into the sandbox, so it imports nothing of the pipeline.
"""

from __future__ import annotations

import ast
import io
import os
import struct
import sys
import traceback
from pprint import pformat

NAME = "<code>"
ANSWER = struct.Struct("<iii")  # bytes of each text; -1 where there is none


class Kept(io.TextIOBase):
    """The first `room` characters that are printed."""

    def __init__(self, room: int) -> None:
        self.room, self.parts = room, []

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.room > 0:
            self.parts.append(text[: self.room])
            self.room -= len(text)
        return len(text)


def execute(code: str, names: dict, room: int) -> tuple[str, str | None, str | None]:
    printed = sys.stdout = sys.stderr = Kept(room)
    value = error = None
    try:
        tree = ast.parse(code, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), names)
        if last is not None:
            value = pformat(eval(compile(ast.Expression(last.value), NAME, "eval"), names))[:room]
    except BaseException as raised:
        lines = [frame.lineno for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == NAME]
        said = traceback.format_exception_only(raised)[-1].strip()
        error = f"line {lines[-1]}: {said}" if lines else said
    return "".join(printed.parts), value, error


def told(printed: str, value: str | None, error: str | None, room: int) -> bytes:
    """The answer, its texts at most `room` bytes together. What was printed gives way to the others."""
    last = [None if text is None else text.encode(errors="replace")[:room] for text in (value, error)]
    texts = [printed.encode(errors="replace")[: room - sum(len(text or b"") for text in last)], *last]
    return ANSWER.pack(*(-1 if text is None else len(text) for text in texts)) + b"".join(text or b"" for text in texts)


def main(room: int) -> None:
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    names = {"__name__": "__main__"}
    while length := questions.read(4):
        code = questions.read(*struct.unpack("<I", length)).decode()
        answers.write(told(*execute(code, names, room), room))
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
