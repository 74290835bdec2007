"""Read the last step from the files that W&B writes offline.

A .wandb file has a header of 7 bytes and then LevelDB's log format: blocks of 32 KiB with fragments of records, each with a
checksum (4 bytes), a length (2), and a kind (1: whole, 2: first, 3: middle, 4: last). A record is a protobuf `Record`. A record
of type `history` has the values of one step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HEAD, BLOCK, FRAGMENT = 7, 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


@dataclass
class _Position:
    """The position up to which a file has been read, which is the end of a record."""

    offset: int = HEAD
    step: int = -1


class TransactionLog:
    """The files of all starts of one run. Each call reads only the records that are new since the last call."""

    def __init__(self, folder: Path, run: str):
        """Bind to the files folder/offline-run-TIME-RUN/run-RUN.wandb. run: W&B's id of the run, RUN."""
        self._folder = folder
        self._run = run
        self._read: dict[Path, _Position] = {}

    def last_step(self) -> int:
        """Return the last step in any of the files; -1 if none."""
        for path in self._folder.glob(f"offline-run-*-{self._run}/run-{self._run}.wandb"):
            position = self._read.setdefault(path, _Position())
            for record, end in records(path, position.offset):
                position.offset = end
                position.step = max(position.step, *(int(row["_step"]) for row in histories(record)), -1)
        return max((position.step for position in self._read.values()), default=-1)


def records(path: Path, offset: int = HEAD) -> Iterator[tuple[bytes, int]]:
    """Yield (record, offset after it) for each complete record from an offset on."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    at, parts = 0, b""
    while True:
        if (left := BLOCK - (offset + at) % BLOCK) < FRAGMENT.size:
            at += left  # the end of a block, which no fragment fits into
        if at + FRAGMENT.size > len(data):
            return
        _, length, kind = FRAGMENT.unpack_from(data, at)
        end = at + FRAGMENT.size + length
        if kind == 0 or end > len(data):
            return
        parts += data[at + FRAGMENT.size : end]
        at = end
        if kind in (WHOLE, LAST):
            yield parts, offset + at
            parts = b""


def histories(record: bytes) -> Iterator[dict[str, str]]:
    """Yield name -> value as JSON for the step in a record; nothing if the record is not of type `history`."""
    parsed: Any = import_module("wandb.proto.wandb_internal_pb2").Record()
    parsed.ParseFromString(record)
    if parsed.WhichOneof("record_type") == "history":
        yield {"/".join(item.nested_key) or item.key: item.value_json for item in parsed.history.item}
