"""The interpreter of a Python tool, inside the sandbox: variables persist from one piece of code to the next.

It reads pieces of code and answers each with three texts: the printed text, the value of a last expression, and the error.
Code is preceded by its length in four bytes; an answer is an ANSWER header and the texts. All texts are UTF-8. Output that the
code writes directly to file descriptor 1 is lost. Nothing protects the answers: code that runs here can forge them.

The file is copied into the sandbox, so it imports nothing of the pipeline.
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
ANSWER = struct.Struct("<iii")  # bytes of each text; -1 for a text that is None


class BoundedOutput(io.TextIOBase):
    """Keeps the first `room` characters that are written."""

    def __init__(self, room: int) -> None:
        self.room: int = room
        self.parts: list[str] = []

    def writable(self) -> bool:
        """Return True, as io.TextIOBase requires of a stream for `print`."""
        return True

    def write(self, text: str) -> int:
        """Keep as much of the text as fits, and return its whole length as written."""
        if self.room > 0:
            self.parts.append(text[: self.room])
            self.room -= len(text)
        return len(text)


def execute(code: str, variables: dict, room: int) -> tuple[str, str | None, str | None]:
    """Run a piece of code and return (printed text, value of a last expression, error).

    The printed text and the value have at most `room` characters each.
    """
    printed = sys.stdout = sys.stderr = BoundedOutput(room)
    value = error = None
    try:
        tree = ast.parse(code, NAME)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, NAME, "exec"), variables)
        if isinstance(last, ast.Expr):
            value = pformat(eval(compile(ast.Expression(last.value), NAME, "eval"), variables))[:room]
    except BaseException as raised:
        lines = [frame.lineno for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == NAME]
        text = traceback.format_exception_only(raised)[-1].strip()
        error = f"line {lines[-1]}: {text}" if lines else text
    return "".join(printed.parts), value, error


def encode_answer(printed: str, value: str | None, error: str | None, room: int) -> bytes:
    """Return the answer's bytes. Its texts have at most `room` bytes together; the printed text is cut first."""
    last = [None if text is None else text.encode(errors="replace")[:room] for text in (value, error)]
    texts = [printed.encode(errors="replace")[: room - sum(len(text or b"") for text in last)], *last]
    return ANSWER.pack(*(-1 if text is None else len(text) for text in texts)) + b"".join(text or b"" for text in texts)


def main(room: int) -> None:
    """Answer pieces of code from stdin until it ends. room: bytes of one answer's texts."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    variables = {"__name__": "__main__"}
    while length := requests.read(4):
        code = requests.read(*struct.unpack("<I", length)).decode()
        answers.write(encode_answer(*execute(code, variables, room), room))
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
