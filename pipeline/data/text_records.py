"""Read records of JSON lines, JSON arrays, CSV and TSV one by one.

Only the position of each record stays in memory, 8 bytes a record. The positions come from one pass over the file, at about a
gigabyte a second. A compressed file is first decompressed into the cache (`row_cache.py`), since only all of it can be read.
"""

from __future__ import annotations

import codecs
import csv
import errno
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.data import file_formats, row_cache
from pipeline.data.columns import parse_conversation
from pipeline.data.file_formats import FileFormat
from pipeline.data.records import parse_json, parse_record
from pipeline.recipe import user_files

CHUNK = 1 << 20  # bytes of the file in memory at a time
CHECKED_BYTES = 512 << 20
"""Every record before this position is parsed at the start, which takes seconds. Later lines of JSON must begin as objects."""
NEWLINE, QUOTE, BACKSLASH = b"\n"[0], b'"'[0], b"\\"[0]
OPEN, CLOSED, SPACES = b"{[", b"}]", b" \t\r\n"
IS_OPEN, IS_BRACKET, IS_SPACE = (np.isin(np.arange(256), list(marks)) for marks in (OPEN, OPEN + CLOSED, SPACES))

Record = dict[str, Any]


class TextRecords(Sequence):
    """The records of a text file, which are read and parsed on access.

    The constructor raises OSError for a file that cannot be read or has a record of more than MAX_LINE bytes and, unless
    `drops`, ValueError, with the record's location, for text that is no record. Reading such a record raises ValueError.
    """

    def __init__(self, path: Path, form: FileFormat, drops: bool = False) -> None:
        self._path, self._form = path, form
        if form.compression:
            path = row_cache.cached(path, "text", lambda new: _decompress(self._path, form.compression, new))
        self._file = user_files.open_file(path)
        size = os.fstat(self._file.fileno()).st_size
        self._rows = RecordBounds(self._path, self._file, form, size)
        if not drops:
            self._check()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        begin, end = self._rows.span(index)
        if end - begin > user_files.MAX_LINE:
            raise ValueError(f"the {self._form.unit} has more than {user_files.MAX_LINE >> 20} MiB; expected one record")
        return self._rows.parse(os.pread(self._file.fileno(), end - begin, begin))

    def place(self, index: int) -> str:
        """Return a record's location for messages."""
        return self._form.place(self._path, self._rows.number(index))

    def _check(self) -> None:
        if (overlong := self._rows.overlong(user_files.MAX_LINE)) is not None:
            self._rows.refuse_overlong(overlong, user_files.MAX_LINE)
        for index in self._rows.doubtful(CHECKED_BYTES):
            try:
                self[index]
            except ValueError as error:
                raise ValueError(f"{self.place(index)}: {error}") from None


def first_records(path: Path, form: FileFormat, most: int, longest: int) -> Iterator[tuple[int, Record | ValueError]]:
    """Yield (number, record or its fault) of the records in the first `most` bytes of a text file, without converting it.

    Raises OSError for a file that cannot be read, or whose first unfinished record has more than `longest` bytes.
    """
    with file_formats.open_bytes(path, form.compression) as file:
        content = b"".join(file_formats.chunks(path, file, CHUNK, most + 1))
    whole = len(content) <= most
    content = content[:most]
    rows = RecordBounds(path, io.BytesIO(content), form, len(content), whole)
    for index in range(len(rows)):
        begin, end = rows.span(index)
        if end - begin > longest:
            rows.refuse_overlong(index, longest)
        if not whole and index == len(rows) - 1:  # the bound cuts it
            return
        try:
            yield rows.number(index), rows.parse(content[begin:end])
        except ValueError as error:
            yield rows.number(index), error


class RecordBounds:
    """The positions of the records in a text."""

    def __init__(self, path: Path, file: BinaryIO, form: FileFormat, size: int, whole: bool = True) -> None:
        """Find the records.

        file: open at its beginning. size: its bytes. whole: whether the text is complete; else it is the beginning of one.
        Raises ValueError for a text whose structure is broken.
        """
        self._path, self._form, self._file = path, form, file
        self._skipped = np.zeros(0, np.int64)  # numbers of blank lines, less the number of those before
        self._doubtful = np.zeros(0, np.int64)
        self._bounds = np.zeros(1, np.int64)
        self._header: list[str] = []
        if form.name == "json":
            self._find_elements(size, whole)
        elif size:
            self._find_lines()
        if form.name in ("csv", "tsv") and len(self):
            begin, end = self.span(0)
            self._header = self._header_of(_at(file, begin, min(end - begin, user_files.MAX_LINE)))
            self._bounds = self._bounds[1:]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def span(self, index: int) -> tuple[int, int]:
        """Return (begin, end) of a record in bytes; spaces, and in an array a comma, may follow it."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return int(self._bounds[index]), int(self._bounds[index + 1])

    def number(self, index: int) -> int:
        """Return the number of a record in messages: its line, from 1, or its place among the records, from 0."""
        if self._form.unit != "line":
            return index
        return index + 1 + int(np.searchsorted(self._skipped, index, side="right"))

    def overlong(self, longest: int) -> int | None:
        """Return the first record of more than `longest` bytes; None without one."""
        above = np.flatnonzero(np.diff(self._bounds) > longest)
        return int(above[0]) if len(above) else None

    def refuse_overlong(self, index: int, longest: int) -> None:
        """Raise OSError for a record of more than `longest` bytes."""
        unit, size = self._form.unit, f"{longest >> 20} MB"
        expected = "one record per line" if unit == "line" else "smaller records"
        why = f"{unit} {self.number(index)} has more than {size}; expected {expected}"
        raise OSError(errno.EFBIG, why, str(self._path))

    def doubtful(self, checked: int) -> Iterator[int]:
        """Yield the records to parse at the start: those before byte `checked`, lines that begin no object, and the last."""
        first = int(np.searchsorted(self._bounds[:-1], checked))
        yield from range(first)
        yield from self._doubtful[np.searchsorted(self._doubtful, first) :].tolist()
        if len(self) > first:
            yield len(self) - 1

    def parse(self, text: bytes) -> Record:
        """Return the record of a text in the bounds of `span`. Raise ValueError for another text."""
        if self._form.name == "jsonl":
            return parse_record(text.strip())
        if self._form.name == "json":
            return parse_record(text.rstrip(b", \t\r\n"), "an array of objects")
        cells = self._cells(text)
        if len(cells) != len(self._header):
            raise ValueError(f"got a row of {len(cells)}; expected {len(self._header)} cells, as in the header")
        return {name: _value(cell) for name, cell in zip(self._header, cells, strict=True)}

    # ---- lines and rows --------------------------------------------------------------------------------------------------

    def _find_lines(self) -> None:
        """Set the bounds of lines or, in CSV, of rows, whose quotes are even in number. Leave out blank lines."""
        quoted = self._form.name != "jsonl"
        starts: list[np.ndarray] = []
        spaces: list[int] = []  # rows that begin with a space, which may be blank
        others: list[int] = []  # rows that begin with neither a space nor an object
        pending, offset, odd, count = 0, 0, 0, 0  # start of the next row and of the chunk; whether a quote is open; rows so far
        for chunk in file_formats.chunks(self._path, self._file, CHUNK):
            text = np.frombuffer(chunk, np.uint8)
            ends = np.flatnonzero(text == NEWLINE)
            if quoted:
                quotes = np.flatnonzero(text == QUOTE)
                ends = ends[(np.searchsorted(quotes, ends) + odd) % 2 == 0]
                odd = (odd + len(quotes)) % 2
            new = ends + 1
            if pending == offset:
                new = np.concatenate([[0], new])
            pending = offset + len(chunk) if len(new) and new[-1] == len(chunk) else -1
            new = new[new < len(chunk)]
            first = text[new]
            is_space = IS_SPACE[first]
            spaces += (np.flatnonzero(is_space) + count).tolist()
            others += [] if quoted else (np.flatnonzero(~is_space & (first != OPEN[0])) + count).tolist()
            starts.append(new + offset)
            offset, count = offset + len(chunk), count + len(new)
        self._bounds = np.concatenate([*starts, [offset]])
        starts.clear()
        blank = np.array([at for at in spaces if self._is_blank(*self.span(at))], np.int64)
        if len(blank):
            self._bounds = np.delete(self._bounds, blank)
        self._skipped = blank - np.arange(len(blank))
        doubtful = np.array(sorted(others if quoted else [*others, *set(spaces) - set(blank.tolist())]), np.int64)
        self._doubtful = doubtful - np.searchsorted(blank, doubtful)

    def _is_blank(self, begin: int, end: int) -> bool:
        while begin < end:
            part = _at(self._file, begin, min(end - begin, CHUNK))
            if part.strip():
                return False
            begin += len(part)
        return True

    def _header_of(self, text: bytes) -> list[str]:
        names = self._cells(text.removeprefix(codecs.BOM_UTF8))
        if len(names) == 1 and (other := next((mark for mark in ";|\t," if mark in names[0]), None)):
            suffix = " and the suffix .tsv" if other == "\t" else " and the suffix .csv" if other == "," else ""
            wanted = "tabs" if self._form.name == "tsv" else "commas"
            message = f"got the header {names[0][:80]!r}; expected columns between {wanted}"
            raise ValueError(f"{self._path}: {message}. Try {wanted if not suffix else 'the same text'}{suffix}")
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{self._path}: got two columns '{double}' in the header; expected different names")
        return names

    def _cells(self, text: bytes) -> list[str]:
        """Return the cells of a row. Raise ValueError, which names the cause, for other text."""
        try:
            row = text.decode()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{text[error.start]:02x}"
            raise ValueError(f"got {byte}, not UTF-8; expected UTF-8. Try iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW") from None
        csv.field_size_limit(user_files.MAX_LINE)
        delimiter, advice = (
            ("\t" if self._form.name == "tsv" else ","),
            "Try to put a cell with quotes in quotes, and double them",
        )
        try:
            rows = list(csv.reader(io.StringIO(row, newline=""), delimiter=delimiter, strict=True))
        except csv.Error as error:
            raise ValueError(f"not {self._form.name.upper()}: {error}. {advice}") from None
        rows = [cells for cells in rows if cells]
        if len(rows) != 1:
            raise ValueError(f"got a row with {len(rows)} lines and an odd quote; expected one row. {advice}")
        return rows[0]

    # ---- arrays ----------------------------------------------------------------------------------------------------------

    def _find_elements(self, size: int, whole: bool) -> None:
        """Set the bounds of an array's elements: from the bracket that opens an element to the next such bracket."""
        begins, depth, offset, odd, escapes, end = [], 0, 0, 0, 0, None
        for chunk in file_formats.chunks(self._path, self._file, CHUNK):
            text = np.frombuffer(chunk, np.uint8)
            quotes, escapes = _plain_quotes(text, escapes)
            brackets = np.flatnonzero(IS_BRACKET[text])
            brackets = brackets[(np.searchsorted(quotes, brackets) + odd) % 2 == 0]  # those outside texts
            odd = (odd + len(quotes)) % 2
            opens = IS_OPEN[text[brackets]]
            depths = depth + np.cumsum(np.where(opens, 1, -1))
            if end is not None and len(brackets):
                raise ValueError(f"{self._path}: got text after the JSON array; expected one array")
            if len(closing := np.flatnonzero(depths == 0)):
                end = offset + int(brackets[closing[0]])
                depths[closing[0] + 1 :] = 0
            begins.append(brackets[opens & (depths == 2)] + offset)
            depth, offset = int(depths[-1]) if len(depths) else depth, offset + len(chunk)
        found = np.concatenate(begins) if begins else np.zeros(0, np.int64)
        if whole and end is None:
            inside = f" inside record {len(found) - 1} (from 0)" if len(found) else ""
            raise ValueError(f"{self._path}: got a JSON array that ends{inside}; expected ']' at its end. Try to copy it again")
        first = _at(self._file, 0, int(found[0]) if len(found) else min(size, CHUNK))
        if (between := first.removeprefix(codecs.BOM_UTF8).strip()) not in (b"[", b"[]"):
            raise ValueError(f"{self._path}: got {between[:40]!r} before the first object; expected an array of objects")
        self._bounds = np.append(found, size if end is None else end)


def _plain_quotes(text: np.ndarray, escapes: int) -> tuple[np.ndarray, int]:
    """Return (the positions of quotes that no backslash escapes, the number of backslashes at the end).

    text: bytes `[N]`. escapes: the number of backslashes just before it.
    """
    quotes, slashes = np.flatnonzero(text == QUOTE), np.flatnonzero(text == BACKSLASH)
    if not len(slashes):
        return (quotes[1:] if escapes % 2 and len(quotes) and quotes[0] == 0 else quotes), (0 if len(text) else escapes)
    runs = np.cumsum(np.diff(slashes, prepend=-2) != 1) - 1
    starts = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    lengths = np.arange(len(slashes)) - starts[runs] + 1  # of the run up to each backslash
    if slashes[0] == 0:
        lengths[runs == 0] += escapes
    before = np.searchsorted(slashes, quotes - 1)
    preceded = (before < len(slashes)) & (slashes[np.minimum(before, len(slashes) - 1)] == quotes - 1)
    escaped = preceded & (lengths[np.minimum(before, len(slashes) - 1)] % 2 == 1)
    if escapes % 2 and len(quotes) and quotes[0] == 0:
        escaped[0] = True
    return quotes[~escaped], (int(lengths[-1]) if slashes[-1] == len(text) - 1 else 0)


def _value(cell: str) -> Any:
    """Return a cell's text, or its messages if it is a JSON array of messages."""
    if cell[:1] == "[" and '"' in cell:
        try:
            return parse_conversation(parse_json(cell), "")
        except ValueError:
            return cell
    return cell


def _at(file: BinaryIO, begin: int, size: int) -> bytes:
    file.seek(begin)
    return file.read(size)


def _decompress(path: Path, compression: str, new: Path) -> None:
    with file_formats.open_bytes(path, compression) as file, new.open("wb") as text:
        for chunk in file_formats.chunks(path, file, CHUNK):
            text.write(chunk)
