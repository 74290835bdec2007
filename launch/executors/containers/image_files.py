"""Recognize image files by their headers, and check that they are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Problem
from pipeline.models.weight_files import fault_code, file_fault
from pipeline.recipe import user_files

SIF, SQUASHFS = "SIF", "squashfs"
HEADER = 128
"""Bytes at the beginning of a file that `length` needs."""
RUNTIME_OF = {SIF: "apptainer", SQUASHFS: "pyxis"}


def kind_of(start: bytes) -> str | None:
    """Return the kind of an image file, SIF or SQUASHFS, from its beginning; None for any other file."""
    if start[32:41] == b"SIF_MAGIC":
        return SIF
    return SQUASHFS if start[:4] == b"hsqs" else None


def length(start: bytes) -> int:
    """Return the length in bytes that the header of a SIF or squashfs file states.

    SIF: the offset and the size of its data, the last two numbers of the header
    (https://github.com/apptainer/sif/blob/main/pkg/sif/sif.go, `header`). squashfs: `bytes_used` of the superblock
    (https://dr-emann.github.io/squashfs/squashfs.html).
    """
    numbers = (112, 120) if kind_of(start) == SIF else (40,)
    return sum(int.from_bytes(start[at : at + 8], "little") for at in numbers)


def problems(key: str, path: Path, kinds: tuple[str, ...], expected: str) -> Iterator[Problem]:
    """Yield a problem if a file is missing, unreadable, cut off, or of none of these kinds. expected: such a file, in words."""
    if reason := file_fault(path):
        advice = f"give the path of {expected.partition(',')[0]}"
        yield Problem(key, fault_code(reason), f"{path} {reason.replace('fetch it again', advice)}")
        return
    with user_files.open_file(path) as file:
        start = file.read(HEADER)
    kind = kind_of(start)
    if kind not in kinds:
        other = f". It is a {kind} image: try cluster.container_runtime={RUNTIME_OF[kind]}" if kind else ""
        yield Problem(key, "bad-format", f"got {path}; expected {expected}{other}")
    elif (size := path.stat().st_size) < (whole := length(start)):
        yield Problem(key, "unreadable", f"{path} is cut off: it has {size:,} of {whole:,} bytes. Try to copy it again")
