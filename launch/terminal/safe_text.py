"""Make text of logs and run folders safe to print on a terminal."""

from __future__ import annotations

import os
import re
import sys
import unicodedata

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

JOINERS = "\u200c\u200d"
"""Invisible characters that join Persian and Indian letters, and emoji."""


def plain(text: str) -> str:
    r"""Return the text without colours, and with all other control characters escaped, such as `\x1b`.

    Newlines, tabs and all kinds of spaces stay. Logs hold the output of models and programs, whose control characters could
    move the cursor, overwrite lines, or set the window's title or the clipboard.
    """
    text = COLOUR.sub("", text)
    return text if text.isprintable() else "".join(map(_escape, text))


def on_one_line(text: str) -> str:
    r"""Return `plain` text with each newline as `\n`."""
    return plain(text).replace("\n", "\\n")


def no_more_output() -> None:
    """Discard the buffered text of stdout, because the reader of the pipe has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape(character: str) -> str:
    harmless = character.isprintable() or character in f"\n\t{JOINERS}" or unicodedata.category(character) == "Zs"
    return character if harmless else character.encode("unicode_escape").decode()
