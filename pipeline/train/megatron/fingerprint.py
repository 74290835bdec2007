"""Compute the fingerprint of a conversion from the content of a checkpoint's files and the conversion's layout.

Names and paths of files do not matter: a file's content is identified by its SHA-256. In the Hugging Face cache this is the
file's name, which is trusted because these files are read-only. Other files are read once. Their digests are cached in
`digests/` of the shared folder, by real path, size, modification time and inode. The digest of a file that changed a moment ago
is not cached, because the file could change again within the same tick of the file system's clock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.files.digests import sha256
from pipeline.files.storage import write_durably
from pipeline.models.family import Parameter
from pipeline.models.recorded_layout import record
from pipeline.train.megatron.collectives import on_all_ranks

logger = logging.getLogger(__name__)

CONVERTER = 1  # increase it to convert the same layout again
SETTLED_S = 2.0  # seconds; file systems stamp changes in steps of up to about one


def content_digests(files: Sequence[Path], cache: Path, group: dist.ProcessGroup) -> list[str]:
    """Return the SHA-256 of each file, in hex. Collective: ranks read different files. cache: the folder of cached digests."""
    rank, size = group.rank(), group.size()
    parts = on_all_ranks(group, lambda: json.dumps([_digest(file, cache) for file in files[rank::size]]))
    digests = [""] * len(files)
    for i, part in enumerate(parts):
        digests[i::size] = json.loads(part)
    return digests


def fingerprint(
    digests: Sequence[str],
    parameters: Mapping[str, Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    chosen: Mapping[str, str],
) -> str:
    """Return 64 hex digits, which are equal for checkpoints with equal file contents that `parameters` converts equally.

    shapes: {name: shape} of the checkpoint's tensors. chosen: if several files hold the same tensor, {tensor: digest of the
    file that it is read from}; else empty, so that the fingerprint does not depend on the index. The model's configuration
    matters only through the layout of the parameters' functions.
    """
    combined = hashlib.sha256(json.dumps([CONVERTER, sorted(digests)]).encode())
    if chosen:
        combined.update(json.dumps(sorted(chosen.items())).encode())
    for name, parameter in parameters.items():
        shape, pieces = record(parameter.function, [(source, shapes[source]) for source in parameter.sources])
        boxes = [[p.name, p.source.offset, p.source.size, p.target.offset, p.target.size] for p in pieces]
        combined.update(json.dumps([name, shape, boxes]).encode())
    return combined.hexdigest()


def _digest(file: Path, cache: Path) -> str:
    real = file.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", real.name) and real.parent.name == "blobs":
        return real.name
    state = _state(real)
    cached = cache / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
    if cached_digest := _cached_digest(cached, state):
        return cached_digest
    settled = time.time() - state["mtime_ns"] / 1e9 > SETTLED_S
    digest = sha256(real)
    if _state(real) != state:
        raise RuntimeError(f"{real} changed while it was read")
    if settled:
        try:
            write_durably(cached, json.dumps({**state, "sha256": digest}))
        except OSError as error:
            logger.warning("the digest of %s cannot be cached (%s); the next start reads the file again", real, error)
    return digest


def _state(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"path": str(file), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _cached_digest(cached: Path, state: dict[str, Any]) -> str | None:
    """Return the digest in the file `cached`; None if this file does not exist or is for another state of the digested file."""
    try:
        record = json.loads(cached.read_text())
    except FileNotFoundError:
        return None
    digest = record.pop("sha256")
    return digest if record == state else None
