"""Read files whose paths a user or a recipe gives: regular files only, and never more than a bound.

A path can name a device that has no end, a pipe that nobody writes to, or one line of many gigabytes. All errors are OSError
with `strerror` and `filename`, like those of `open`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

MAX_LINE = 64 << 20
"""Longest line of a data file, in bytes: a record with some images in it."""
MAX_TEXT = 16 << 20
"""Largest prompt, template, source, configuration or index, in bytes. JSON takes up to twenty times as much memory."""
MAX_JSON = 64 << 20
"""Largest tokenizer.json, in bytes: those of large vocabularies have 10 to 40 MB."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises OSError for anything else, and never waits for a pipe."""
    try:
        _refuse_others(path, os.stat(path).st_mode)  # first, because opening a device can have effects
    except ValueError as error:  # a name with a zero
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _refuse_others(path, os.fstat(descriptor).st_mode)  # it may have been replaced since
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _refuse_others(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"it is {kind}; expected a regular file", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], most: int = MAX_TEXT) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {_size(most)}; expected less", os.fspath(path))
    return content


def read_text(path: str | os.PathLike[str], most: int = MAX_TEXT) -> str:
    """Return the text of a regular file of at most `most` bytes, with every line end as a newline.

    Raises OSError, and UnicodeDecodeError for a file that is not UTF-8.
    """
    text = read_bytes(path, most).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _size(count: int) -> str:
    return f"{count >> 20} MB" if count >= 1 << 20 else f"{count} bytes"
