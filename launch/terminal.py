"""Text of logs and run folders, made safe for a terminal."""

from __future__ import annotations

import os
import re
import sys
import unicodedata

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

JOINERS = "\u200c\u200d"
"""Characters that join Persian and Indian letters, and emoji."""


def plain(text: str) -> str:
    r"""Return the text without colours, and with what else a terminal would obey written out: the escape character as `\x1b`.

    Newlines, tabs and all kinds of blanks stay. A log holds what a model or a program has said, which may move the cursor,
    write over lines, set the window's title or the clipboard.
    """
    text = COLOUR.sub("", text)
    return text if text.isprintable() else "".join(map(_shown, text))


def on_one_line(text: str) -> str:
    r"""Return the same with each newline as `\n`."""
    return plain(text).replace("\n", "\\n")


def no_more_output() -> None:
    """Discard what is buffered for stdout, whose reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _shown(character: str) -> str:
    harmless = character.isprintable() or character in f"\n\t{JOINERS}" or unicodedata.category(character) == "Zs"
    return character if harmless else character.encode("unicode_escape").decode()
