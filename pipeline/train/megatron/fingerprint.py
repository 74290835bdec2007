"""What a conversion is of: the content of a checkpoint's files, and what is made of them, whatever their names and paths.

A file's content is known by its SHA-256. Files in the Hugging Face cache bear it as their name; it is trusted, as the cache
holds them read-only. Others are read once, and their digests are remembered in `digests/` of the shared folder by real path,
size, time of change and inode. A file that changed a moment ago is not remembered, because it could change again within
the same tick of the file system's clock.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from pipeline.models.base import Parameter
from pipeline.models.recorded_layout import record
from pipeline.storage import write_durably
from pipeline.train.megatron.collectives import on_all_ranks

CONVERTER = 1  # to be raised when the same layout is to be converted anew
SETTLED_S = 2.0  # seconds; file systems stamp changes in steps of up to about one


def content_digests(files: Sequence[Path], memory: Path, group: dist.ProcessGroup) -> list[str]:
    """The SHA-256 of each file in hex; `memory` is the folder that remembers them. Collective: ranks share the reading."""
    rank, size = group.rank(), group.size()
    parts = on_all_ranks(group, lambda: json.dumps([_digest(file, memory) for file in files[rank::size]]))
    digests = [""] * len(files)
    for i, part in enumerate(parts):
        digests[i::size] = json.loads(part)
    return digests


def fingerprint(digests: Sequence[str], parameters: Mapping[str, Parameter], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """64 hex digits. Two checkpoints share them if their files have the same content and `parameters` makes the same of it.

    shapes: of the checkpoint's tensors. The configuration counts through what the parameters' functions do with it, so what
    does not shape the weights does not matter.
    """
    whole = hashlib.sha256(json.dumps([CONVERTER, sorted(digests)]).encode())
    for name, parameter in parameters.items():
        shape, pieces = record(parameter.function, [(source, shapes[source]) for source in parameter.sources])
        boxes = [[p.name, p.source.offset, p.source.size, p.target.offset, p.target.size] for p in pieces]
        whole.update(json.dumps([name, shape, boxes]).encode())
    return whole.hexdigest()


def _digest(file: Path, memory: Path) -> str:
    real = file.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", real.name) and real.parent.name == "blobs":
        return real.name
    state = _state(real)
    remembered = memory / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
    if known := _recall(remembered, state):
        return known
    settled = time.time() - state["mtime_ns"] / 1e9 > SETTLED_S
    with open(real, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if _state(real) != state:
        raise RuntimeError(f"{real} changed while it was read")
    if settled:
        try:
            write_durably(remembered, json.dumps({**state, "sha256": digest}))
        except OSError as error:
            print(f"hetstep: the digest of {real} cannot be remembered ({error}); the next start reads it again", flush=True)
    return digest


def _state(file: Path) -> dict[str, str | int]:
    status = file.stat()
    return {"path": str(file), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _recall(remembered: Path, state: dict[str, str | int]) -> str | None:
    try:
        note = json.loads(remembered.read_text())
    except FileNotFoundError:
        return None
    digest = note.pop("sha256")
    return digest if note == state else None
