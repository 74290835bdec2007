"""Recognize the format of a data file by its first bytes and its name.

    jsonl      .jsonl, .ndjson, .json    one JSON object a line
    json       .json                     one array of JSON objects
    csv, tsv   .csv, .tsv                a header, then one record a row, quoted as RFC 4180 says
    parquet    .parquet                  Apache Parquet
    arrow      .arrow, .feather, .ipc    an Arrow IPC file or stream, such as the files of `save_to_disk`

The texts may be compressed: .gz, .bz2, .xz, .zst. Parquet and Arrow are recognized by their content, CSV by its name.
"""

from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.recipe import user_files

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
NAMES = {
    "jsonl": "JSON lines",
    "json": "a JSON array",
    "csv": "CSV",
    "tsv": "TSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
}
"""Format -> its name in messages."""
EXPECTED = "Parquet, Arrow, CSV, TSV, a JSON array or JSON lines"
TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
"""First bytes -> format, for formats with typed columns."""
MARKS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
"""First bytes -> suffix of a compressed file."""
OTHERS = {
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unzip, or CSV exported by the spreadsheet"),
    b"PARE": ("an encrypted Parquet file", "a copy that is not encrypted"),
    b"SQLite format 3": ("a SQLite database", "sqlite3 -json FILE 'select * from TABLE' > NEW.json"),
    b"\x89HDF": ("an HDF5 file", "a copy in Parquet"),
    b"\x93NUMPY": ("a NumPy file", "a copy in Parquet"),
    b"\x80\x04": ("a pickle", "a copy in Parquet"),
    b"\x80\x05": ("a pickle", "a copy in Parquet"),
    b"Obj\x01": ("an Avro file", "a copy in Parquet"),
    b"ORC": ("an ORC file", "a copy in Parquet"),
    codecs.BOM_UTF16_LE: ("text in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    codecs.BOM_UTF16_BE: ("text in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
}
"""First bytes of a file that is in no known format -> (what it is, what to try)."""
HEAD = 4096  # bytes that tell the format


@dataclass(frozen=True)
class FileFormat:
    """A format of NAMES, and the suffix of its compression; "" for none."""

    name: str
    compression: str = ""

    @property
    def is_text(self) -> bool:
        """Return whether records are ranges of bytes, not rows of typed columns."""
        return self.name not in ("parquet", "arrow")

    @property
    def unit(self) -> str:
        """Return the unit that numbers a record in messages."""
        return {"jsonl": "line", "parquet": "row", "arrow": "row"}.get(self.name, "record")

    def place(self, path: str | Path, number: int) -> str:
        """Return a record's location for messages. number: the line, from 1, or the row or record, from 0."""
        return f"{path}:{number}" if self.unit == "line" else f"{path}, {self.unit} {number} (from 0)"


def suffix_format(path: str | Path) -> str | None:
    """Return the format that a file's name tells, without its compression; None if it tells none."""
    name, last = os.path.splitext(os.path.basename(path).lower())
    return SUFFIXES.get(os.path.splitext(name)[1] if last in MARKS.values() else last)


def recognize(path: str | Path) -> FileFormat:
    """Return the format of a data file. Raise ValueError for other formats and OSError for a file that cannot be read."""
    with user_files.open_file(path) as file:
        first = file.read(HEAD)
    told = suffix_format(path)
    compression = next((suffix for mark, suffix in MARKS.items() if first.startswith(mark)), "")
    if compression:
        with open_bytes(path, compression) as file:
            first = next(chunks(path, file, HEAD), b"")
    elif first and (last := os.path.splitext(path)[1].lower()) in MARKS.values():
        raise ValueError(f"got {_seems(first)}; expected a compressed file, as the suffix {last} says. Try another suffix")
    if table := next((name for mark, name in TABLES.items() if first.startswith(mark)), None):
        if compression:
            raise ValueError(f"got {NAMES[table]} inside {compression}; expected it uncompressed. Try to decompress it")
        return FileFormat(table)
    if other := next((texts for mark, texts in OTHERS.items() if first.startswith(mark)), None):
        raise ValueError(f"got {other[0]}; expected {EXPECTED}. Try {other[1]}")
    seems = _of_text(first)
    if told in ("parquet", "arrow") or (told in ("csv", "tsv") and seems):
        advice = f"Try the suffix .{seems}" if seems else "Try to write or copy it again"
        raise ValueError(f"got {_seems(first)}; expected {NAMES[told]}, as the suffix says. {advice}")
    if told in ("csv", "tsv"):
        return FileFormat(told, compression)
    text = first.removeprefix(codecs.BOM_UTF8).strip()
    if text.startswith(b"{") and text.partition(b"\n")[0].strip() == b"{":
        message = "got one JSON object over several lines; expected one object a line, or an array of objects"
        raise ValueError(f"{message}. Try jq -c . FILE > NEW.jsonl, or jq -c '.KEY[]' for the array in a key")
    if told is None and text and not seems:
        raise ValueError(f"got {_seems(first)}; expected {EXPECTED}. Try the suffix .csv or .tsv for columns of text")
    is_empty_list = text.startswith(b"[]") and told == "jsonl"  # a line that is no record
    return FileFormat("jsonl" if is_empty_list else seems or "jsonl", compression)


def open_bytes(path: str | Path, compression: str) -> BinaryIO:
    """Open a regular file for reading its decompressed bytes from the beginning. Raises OSError."""
    file = user_files.open_file(path)
    if not compression:
        return file
    opened: Any
    if compression == ".zst":
        import pyarrow  # the standard library of Python 3.11 has no zstd

        opened = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    else:
        opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[compression](file)
    return opened


def chunks(path: str | Path, file: BinaryIO, size: int, most: int | None = None) -> Iterator[bytes]:
    """Yield the content of an open file in chunks of at most `size` bytes. Raise OSError, with the cause, if it is damaged.

    most: the number of bytes after which to stop; None: at the end.
    """
    rest = most
    while rest is None or rest > 0:
        try:
            chunk = file.read(size if rest is None else min(size, rest))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno is not None and error.strerror:  # of the disk
                raise
            raise OSError(errno.EIO, f"it is cut or damaged: {error}. Try to copy it again", str(path)) from None
        if not chunk:
            return
        yield chunk
        rest = None if rest is None else rest - len(chunk)


def _of_text(first: bytes) -> str | None:
    """Return jsonl or json by the first bytes of a text; None if they begin neither an object nor an array of objects."""
    text = first.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        return "json" if text[1:].lstrip()[:1] in (b"{", b"]", b"") else "jsonl"
    return "jsonl" if text.startswith(b"{") else None


def _seems(first: bytes) -> str:
    if not first:
        return "an empty file"
    if name := _of_text(first):
        return NAMES[name]
    if table := next((NAMES[name] for mark, name in TABLES.items() if first.startswith(mark)), None):
        return table
    if b"\0" in first:
        return "binary content"
    return "an HTML page" if first.lstrip().lower().startswith((b"<!doctype", b"<html")) else "text that is not JSON"
