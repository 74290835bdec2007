"""Decide which file holds each weight of a Hugging Face checkpoint, without torch.

Submission, both train backends, evaluations, exports and vLLM's loader all use this choice of files:
`model.safetensors`, or the shards that `model.safetensors.index.json` lists. The index assigns each tensor to one shard. We do
not read a copy of the tensor in another shard, and add a note about it. If a folder has both `model.safetensors` and an index
of other files, we read `model.safetensors`, as transformers does, and add a note.

A safetensors file has 8 bytes with the length of a JSON header, the header, and the tensors' bytes one after another
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePath
from typing import Any

from pipeline.recipe import user_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # the dtypes of weights that the train backends read
ABSENT = ("is missing", "is a link", "is a git-annex link", "has not been downloaded")  # how faults of absent files begin
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_MOST_HEADER = 100_000_000  # bytes, the limit of safetensors
_MOST_INDEX = 256 << 20  # bytes; the index of a model with a million tensors has about 100 MB
_SHOWN = 3  # names in a message


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's position in a safetensors file."""

    path: Path
    dtype: str  # as in the header, e.g. "BF16"
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    nbytes: int


@dataclass(slots=True)
class WeightFiles:
    """Holds the weights of a checkpoint, and the faults of its files."""

    files: dict[str, Path] = field(default_factory=dict)  # by name, in the order of names
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)  # file's name -> fault, e.g. "is missing"
    notes: list[str] = field(default_factory=list)


def read_weight_files(folder: Path) -> WeightFiles:
    """Return the weights of a folder. A folder without weights has no files and no faults."""
    single, index = (os.path.lexists(folder / name) for name in (SINGLE, INDEX))
    if not index:
        return _read(folder, {}, [SINGLE] if single else [])
    try:
        weight_map = read_weight_map(folder / INDEX)
    except ValueError as error:
        if single:
            found = _read(folder, {}, [SINGLE])
            found.notes.append(f"{folder} has {SINGLE}, which is read, and {INDEX}, which {error}")
            return found
        return WeightFiles(faults={INDEX: str(error)})
    listed = sorted(set(weight_map.values()))
    if single and SINGLE not in listed:
        found = _read(folder, {}, [SINGLE])
        found.notes.append(
            f"{folder} has {SINGLE} and {INDEX} of {len(listed)} other files; {SINGLE} is read, as transformers does, and the"
            " others are not. Remove the copy that is not the model"
        )
        return found
    return _read(folder, weight_map, listed)


def read_weight_map(path: Path) -> dict[str, str]:
    """Return {tensor: file's name} of the index at `path`. Raises ValueError with the fault of an index that is not valid."""
    if reason := file_fault(path):
        raise ValueError(reason)
    if path.stat().st_size > _MOST_INDEX:
        raise ValueError(f"has {path.stat().st_size:,} bytes; expected at most {_MOST_INDEX:,}")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        weight_map = None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("is not an index of weight files: it has no JSON object with 'weight_map'; fetch it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"assigns {tensor} to {name!r}; expected the name of a file in the same folder")
    return weight_map


def _read(folder: Path, weight_map: Mapping[str, str], names: Iterable[str]) -> WeightFiles:
    """Return the weights in the named files, from their headers. weight_map: the index's; empty for a single file."""
    found = WeightFiles({name: folder / name for name in names})
    headers: dict[str, dict[str, TensorEntry]] = {}
    for name, path in found.files.items():
        try:
            headers[name] = read_header(path)
        except ValueError as error:
            found.faults[name] = str(error)
    _assign(found, weight_map, headers)
    return found


def _assign(found: WeightFiles, weight_map: Mapping[str, str], headers: Mapping[str, dict[str, TensorEntry]]) -> None:
    """Add the tensors and faults to `found`. A tensor's file is the one in the index, else the only file with the tensor."""
    absent: dict[str, list[str]] = {}
    holders = Counter(tensor for header in headers.values() for tensor in header)
    for tensor, name in weight_map.items():
        if name not in headers:
            continue
        if stored := headers[name].get(tensor):
            found.tensors[tensor] = stored
        else:
            absent.setdefault(name, []).append(tensor)
    for name, lacking in absent.items():
        total = sum(file == name for file in weight_map.values())
        found.faults[name] = (
            f"lacks {len(lacking)} of the {total} tensors that the index assigns to it, first {lacking[0]}; index and weights"
            " are from different downloads: fetch both again"
        )
    unlisted, copies = [], []
    for name, header in headers.items():
        for tensor, stored in header.items():
            if tensor in weight_map:
                copies += [] if weight_map[tensor] == name else [f"{tensor} in {name} (read from {weight_map[tensor]})"]
            elif holders[tensor] > 1:
                others = ", ".join(sorted(other for other in headers if tensor in headers[other]))
                what = f"does not list {tensor}, which is in {others}; expected one file for each tensor"
                found.faults.setdefault(INDEX, what)
            else:
                found.tensors[tensor] = stored
                unlisted += [f"{tensor} in {name}"] if weight_map else []
    if copies:
        found.notes.append(f"weights have copies that are not read, since {INDEX} names another file: {some(copies)}")
    if unlisted:
        found.notes.append(f"weights that {INDEX} does not list are read too: {some(unlisted)}")


def some(names: list[str]) -> str:
    """Return the first names of a list for a message, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# ---- one file -------------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return {name: tensor} of a safetensors file. Raises ValueError with the fault of a file that is not valid."""
    if reason := file_fault(path):
        raise ValueError(reason)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER or size < 8:
            raise ValueError("is not a safetensors file; fetch it again")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"is cut off: it has {size} bytes, and its header alone needs {8 + length}; fetch it again")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, 8 + length, entry) for name, entry in header.items()}
    except _Contradiction as error:
        raise ValueError(f"has a header that contradicts itself: {error}; fetch it again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("is not a safetensors file; fetch it again") from None
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start != end:
            what = f"{name} begins at byte {stored.start}, and the tensor before it ends at byte {end}"
            raise ValueError(f"has a header that contradicts itself: {what}; fetch it again")
        end += stored.nbytes
    if size < end:
        raise ValueError(f"is cut off: it has {size:,} of {end:,} bytes; fetch it again")
    if size > end:
        raise ValueError(f"has {size - end:,} bytes more than its header says; fetch it again")
    return tensors


class _Contradiction(Exception):
    """Raised for a header that has a tensor twice, or a tensor whose bytes do not fit its shape."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise _Contradiction(f"{name} occurs twice")
    return found


def _stored(path: Path, data: int, entry: Mapping[str, Any]) -> TensorEntry:
    """Return one tensor of a header. data: the position of the first byte after the header.

    Raises _Contradiction, ValueError, KeyError or TypeError for a malformed entry.
    """
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError
    if dtype in _BITS and prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise _Contradiction(f"{list(shape)} of {dtype} are not {end - begin} bytes")
    return TensorEntry(path, dtype, shape, data + begin, end - begin)


def file_fault(path: Path) -> str | None:
    """Return the reason why a file cannot be read, such as a Git LFS pointer or an incomplete download; None if it can be."""
    try:
        with user_files.open_file(path) as file:
            start = file.read(64)
    except FileNotFoundError:
        return _why_absent(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file; run `git lfs pull` there"
    if start.startswith(b"/annex/objects/"):
        return "is a git-annex pointer, not the file; run `git annex get` there"
    return None if start else "is empty; fetch it again"


def fault_code(reason: str) -> str:
    """Return the problem code for a text that `file_fault` returned."""
    return "file-not-found" if reason.startswith(ABSENT) else "unreadable"


def _why_absent(path: Path) -> str:
    target = path.resolve()
    places = (target.parent.glob(f"{target.name}*.incomplete"), path.parent.glob(f".cache/huggingface/download/{path.name}*"))
    if any(partial.suffix == ".incomplete" for place in places for partial in place):
        return "has not been downloaded completely (there is an .incomplete file); fetch it again"
    if path.is_symlink():
        if "annex" in target.parts or ".git" in target.parts:
            return "is a git-annex link without its content; run `git annex get` there"
        return f"is a link to {target}, which is not there; fetch it again"
    return "is missing; fetch it again"
