"""Read and write the small files of runs, sweeps, evaluations and registries: texts, JSON, and JSON lines.

A reader returns a value of the requested type. It raises RecipeError if a crash, a full disk or an editor has damaged the file,
and OSError if the file cannot be opened. Both errors name the file. Readers never wait for a pipe, and refuse a file above the
maximum length. A writer replaces the whole file, or adds a whole line.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import yaml

from pipeline.files import storage
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError

Value = TypeVar("Value")

LONGEST = 32 << 20
"""Maximum number of bytes of a file, or of a line of JSON lines. Decoded JSON takes up to twenty times as much memory."""
LONGEST_YAML = 4 << 20
"""Maximum number of bytes of a YAML file. Reading YAML takes a second per megabyte."""
REMEDY = "Try to restore it from a copy, or to delete it"

LAST_MOMENT = 1e11
"""Unix seconds in the year 5138. A later time is refused."""
Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_MOMENT)]
"""Unix seconds."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""A number of steps, ranks or tries."""


# ---- reading ------------------------------------------------------------------------------------------------------------


def read_text(path: Path, key: str = "run", longest: int = LONGEST, remedy: str = REMEDY) -> str | None:
    """Return a file's text; None if there is no file.

    key: the problem's key, which is the command's argument that names the folder. remedy: advice in the problem's message.
    Raises RecipeError for a file that is too long or not UTF-8, and OSError for one that is no regular file or may not be read.
    """
    try:
        with user_files.open_file(path) as file:
            content = file.read(longest + 1)
    except FileNotFoundError:
        return None
    if len(content) > longest:
        raise damaged(path, f"more than {longest:,} bytes", "a small file", key, remedy)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise damaged(path, f"invalid UTF-8 ({error.reason} at byte {error.start})", "UTF-8 text", key, remedy) from None


def read(path: Path, kind: type[Value], key: str = "run", remedy: str = REMEDY) -> Value | None:
    """Return the value in a JSON file, as an object of type `kind`; None if there is no file.

    kind: a dataclass or a Struct, which drops unknown keys; or another type that msgspec knows, such as a TypedDict, which
    keeps unknown keys. Raises RecipeError for a file without such a value, and OSError as `read_text` does.
    """
    text = read_text(path, key, remedy=remedy)
    return None if text is None else parsed(text, kind, path, key, remedy)


def parsed(text: str | bytes, kind: type[Value], where: object, key: str = "run", remedy: str = REMEDY) -> Value:
    """Return the value of a JSON text as type `kind`, as `read` does. where: the file, or FILE:LINE. Raises RecipeError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        cause = "nests too deeply" if isinstance(error, RecursionError) else error
        content = f"invalid JSON ({cause})" if text.strip() else "an empty file"
        raise damaged(where, content, "JSON", key, remedy) from None
    return checked(value, kind, where, key, remedy)


def checked(value: Any, kind: type[Value], where: object, key: str = "run", remedy: str = REMEDY) -> Value:
    """Convert a decoded value to type `kind`, as `read` does. where: the file, or FILE:LINE. Raises RecipeError."""
    try:
        converted = msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise damaged(
            where, f"values that this version cannot use ({error})", "the values that a run writes", key, remedy
        ) from None
    is_record = dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return converted if is_record else value


def read_yaml(path: Path, key: str = "run") -> Any:
    """Return the plain values of a YAML file, such as a run's recipe.yaml; None if there is no file. Raises as `read` does."""
    text = read_text(path, key, LONGEST_YAML)
    try:
        return None if text is None else yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        cause = "it nests too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise damaged(path, f"invalid YAML ({cause[:200]})", "YAML", key) from None


def lines(path: Path, kind: type[Value], key: str = "run") -> Iterator[Value]:
    """Yield the value of each line of a JSON lines file; nothing if there is no file.

    A last line without a newline was interrupted while it was written, and is left out. Raises as `read` does.
    """
    try:
        file = user_files.open_file(path)
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(whole_lines(file, path, key), 1):
            yield parsed(line, kind, f"{path}:{number}", key, "Try to remove this line, or to restore the file from a copy")


def whole_lines(file: BinaryIO, path: Path, key: str = "run") -> Iterator[bytes]:
    """Yield each line that ends in a newline, from the file's position on. Raises RecipeError for one longer than LONGEST."""
    while line := file.readline(LONGEST):
        if not line.endswith(b"\n"):
            if len(line) == LONGEST:
                raise damaged(path, f"a line of more than {LONGEST:,} bytes", "shorter lines of JSON", key)
            return
        yield line


def damaged(where: object, got: str, expected: str, key: str = "run", remedy: str = REMEDY) -> RecipeError:
    """Return the RecipeError of a damaged file, which says what the file has (`got`) and should have (`expected`)."""
    return RecipeError(Problem(key, "unreadable", f"{where}: got {got}; expected {expected}. {remedy}"))


# ---- writing ------------------------------------------------------------------------------------------------------------


def write(path: Path, value: Any) -> None:
    """Write JSON atomically and durably: readers see the old file or the new one. Raises OSError."""
    storage.write_durably(path, json.dumps(value, indent=1) + "\n")


def append(path: Path, value: Any) -> None:
    """Append a line of JSON; it is on disk when this returns. It replaces a last line without its newline. Raises OSError."""
    try:
        with user_files.open_file(path) as file:
            end = end_of_lines(file)
    except FileNotFoundError:
        end = 0
    storage.append(path, end, (json.dumps(value) + "\n").encode())


def end_of_lines(file: BinaryIO, before: int | None = None) -> int:
    """Return the offset behind the last newline, 0 if there is none. before: looks before this offset; None: in all of it."""
    at = file.seek(0, os.SEEK_END) if before is None else before
    while at:
        begin = max(0, at - (1 << 16))
        file.seek(begin)
        if (newline := file.read(at - begin).rfind(b"\n")) >= 0:
            return begin + newline + 1
        at = begin
    return 0
