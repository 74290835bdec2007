"""The interpreter that a tool talks to, from inside the sandbox: names stay from one piece of code to the next.

Reads and writes messages: four bytes of length, then JSON. {"code"} is answered with {"printed", "value", "error"}: what was
printed; of a last expression the text of its value, null without one; what was raised. What the code writes to descriptor 1
past Python is lost. Nothing here is a guard: whatever runs here can answer what it likes.

It is copied into the sandbox, so it imports nothing of the pipeline.
"""

from __future__ import annotations

import ast
import io
import json
import os
import struct
import sys
import traceback
from pprint import pformat

NAME = "<code>"


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


def execute(code: str, names: dict, room: int) -> dict:
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
    return {"printed": "".join(printed.parts), "value": value, "error": error and error[:room]}


def main(room: int) -> None:
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    names = {"__name__": "__main__"}
    while length := questions.read(4):
        code = json.loads(questions.read(*struct.unpack("<I", length)))["code"]
        answer = json.dumps(execute(code, names, room)).encode()
        answers.write(struct.pack("<I", len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
