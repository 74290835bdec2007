"""Mutate a file of a folder: cut it, fill it with other bytes or values, or put something that is no file in its place."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

OTHERS = (
    *(None, True, False, 0, 1, -1, 3.5, 1e308, float("inf"), float("nan"), 10**18, 10**40, "", "x", "\ud800", "a\nb\x1b[31m"),
    *("ü" * 300, [], {}, [None], [[]], [{}], {"a": {}}, {"": None}, [1, "x", None], "2026-11-28T02:39:47+00:00", "1e400"),
)
"""Values that take the place of a value."""
SUFFIXES = (".json", ".jsonl", ".yaml")


def files(folder: Path, without: tuple[str, ...] = ()) -> list[Path]:
    """Return the paths of the files below a folder, within it and in order, without those with a part of these names."""
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if not any(part.startswith(without) for part in path.parts)]


def mutate(draw: random.Random, path: Path) -> str:
    """Mutate a file in place, and return the name of what was done."""
    structured = path.suffix in SUFFIXES
    kind = draw.choice([*BYTES, *(name for name in VALUES for _ in range(6) if structured)])
    if kind in BYTES:
        BYTES[kind](draw, path)
    else:
        _write(path, _changed(draw, _read(path), VALUES[kind], path))
    return kind


# ---- bytes and kinds of files -------------------------------------------------------------------------------------------


def _empty(draw: random.Random, path: Path) -> None:
    path.write_bytes(b"")


def _cut(draw: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def _zeros(draw: random.Random, path: Path) -> None:
    content = path.read_bytes()
    at = draw.randrange(len(content) + 1)
    path.write_bytes(content[:at] + bytes(len(content) - at or 1))


def _binary(draw: random.Random, path: Path) -> None:
    path.write_bytes(draw.randbytes(draw.choice((1, 100, 5000))))


def _bytes_within(draw: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes() or b"x")
    for _ in range(draw.choice((1, 1, 5))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)


def _text(draw: random.Random, path: Path) -> None:
    path.write_text(
        draw.choice(("nonsense\n", "[]\n", "{}\n", "null\n", "1\n", '"x"\n', "\n\n", "[" * 5000, '{"a":' * 5000, "-\n"))
    )


def _huge(draw: random.Random, path: Path) -> None:
    """Make the file 80 MB: one long line, many lines, or a hole."""
    part = draw.choice((b"x" * 1000, b"[[]," * 250, b'{"step": 1, "time": 1.5}\n' * 40, b""))
    with open(path, "wb") as file:
        file.truncate(80_000_000)
        for _ in range(80_000_000 // len(part) if part else 0):
            file.write(part)


def _folder(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(draw: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(target: str) -> Callable[[random.Random, Path], None]:
    def make(draw: random.Random, path: Path) -> None:
        path.unlink()
        path.symlink_to(target if target != "itself" else path.name)

    return make


def _missing(draw: random.Random, path: Path) -> None:
    path.unlink()


def _unreadable(draw: random.Random, path: Path) -> None:
    path.chmod(0)  # root reads it all the same


BYTES: dict[str, Callable[[random.Random, Path], None]] = {
    "empty": _empty,
    "cut": _cut,
    "zeros": _zeros,
    "binary": _binary,
    "bytes within": _bytes_within,
    "another text": _text,
    "huge": _huge,
    "a folder": _folder,
    "a pipe": _fifo,
    "a dangling link": _link("nowhere"),
    "a link to itself": _link("itself"),
    "a link to a device": _link("/dev/zero"),
    "missing": _missing,
    "unreadable": _unreadable,
}


# ---- values -------------------------------------------------------------------------------------------------------------

Place = tuple[Any, Any]
"""A container and a key or an index within it."""


def _places(value: Any) -> list[Place]:
    """Return each place within nested values, at all levels."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in _places(inner)]


def _other(draw: random.Random, place: Place) -> None:
    place[0][place[1]] = copy.deepcopy(draw.choice(OTHERS))


def _without(draw: random.Random, place: Place) -> None:
    del place[0][place[1]]


def _wrapped(draw: random.Random, place: Place) -> None:
    container, key = place
    container[key] = draw.choice((lambda value: [value], lambda value: {"x": value}, str, repr))(container[key])


def _twice(draw: random.Random, place: Place) -> None:
    container, key = place
    if isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        container[f"{key}2"] = container[key]


VALUES: dict[str, Callable[[random.Random, Place], None]] = {
    "another value": _other,
    "a missing key": _without,
    "wrapped": _wrapped,
    "twice": _twice,
}


def _read(path: Path) -> list[Any]:
    """Return the values of a file: of each line of JSON lines, else one."""
    text = path.read_text(errors="replace")
    if path.suffix == ".yaml":
        return [yaml.safe_load(text)]
    try:
        return (
            [json.loads(line.rstrip(",").removeprefix("[")) for line in text.splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(text)]
        )
    except ValueError:
        return [{"text": text[:100]}]


def _changed(draw: random.Random, values: list[Any], change: Callable[[random.Random, Place], None], path: Path) -> list[Any]:
    for _ in range(draw.choice((1, 1, 1, 3))):
        places = _places(values)
        if not places:
            return values
        top = [place for place in places if place[0] is values or any(place[0] is value for value in values)]
        change(draw, draw.choice(top if draw.random() < 0.3 else places))
    return values


def _write(path: Path, values: list[Any]) -> None:
    if path.suffix == ".yaml":
        text = "".join(yaml.safe_dump(value, allow_unicode=False) for value in values)
    else:
        text = "\n".join(json.dumps(value) for value in values) + "\n"
    path.write_text(text)
