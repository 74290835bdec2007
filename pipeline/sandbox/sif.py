"""Find the root file system in a SIF file, the image format of Apptainer and SingularityCE.

A header and a table of descriptors lead to the file's parts (github.com/apptainer/sif, pkg/sif/sif.go, version 01). One part is
the primary system partition; where it is squashfs, it is mounted or unpacked in place, from its offset in the file.

Leaves out: encrypted, ext3 and raw partitions, overlay partitions, OCI-SIF files, and signatures, which nothing checks.
"""

from __future__ import annotations

import json
import struct
from typing import IO, NamedTuple

MAGIC, MAGIC_AT = b"SIF_MAGIC\0", 32  # after a line that starts the file as a program
HEADER, HEADER_AT = struct.Struct("<4q"), 80  # free descriptors, all descriptors, offset and bytes of their table
DESCRIPTOR = struct.Struct("<i?IIIqq40x128s384s")  # type, used, id, group, link, offset, bytes, ..., name, what the type adds
PARTITION = struct.Struct("<ii")  # what a partition adds: its file system and its kind
IS_JSON, IS_PARTITION, IS_OCI_INDEX = 0x4006, 0x4004, 0x400A  # types
SQUASHFS, PRIMARY, OVERLAY = 1, 2, 4
FILE_SYSTEMS = {2: "ext3", 3: "an archive", 4: "raw data", 5: "encrypted squashfs", 6: "encrypted squashfs"}
OCI_CONFIG = b"oci-config.json"
MOST_DESCRIPTORS, MOST_BYTES = 4096, 1 << 20
BUILD = "Try apptainer build NEW.sif SOURCE"


class RootPartition(NamedTuple):
    """The squashfs partition of a SIF file that has the root file system."""

    offset: int  # bytes from the file's beginning
    workdir: str  # of the OCI image that it was built from; "" if unknown


def is_sif(start: bytes) -> bool:
    """Return whether a file that begins with `start`, of 42 bytes or more, is a SIF file."""
    return start[MAGIC_AT:].startswith(MAGIC)


def root_partition(file: IO[bytes]) -> RootPartition:
    """Return the root file system's partition. Raises ValueError for a file that lacks it or whose partition is no squashfs."""
    file.seek(HEADER_AT)
    _, count, table, _ = HEADER.unpack(_read(file, HEADER.size))
    if not 0 < count <= MOST_DESCRIPTORS or table < 0:
        raise ValueError(f"a damaged SIF file. {BUILD}")
    file.seek(table)
    parts = [part for part in DESCRIPTOR.iter_unpack(_read(file, count * DESCRIPTOR.size)) if part[1]]
    offset, workdir = None, ""
    for kind, _, number, _, _, start, size, name, more in parts:
        if start < 0 or size < 0 or start + size > file.seek(0, 2):
            raise ValueError(f"a SIF file whose end is missing. Try to copy it again, or {BUILD[4:]}")
        if kind == IS_PARTITION:
            file_system, role = PARTITION.unpack_from(more)
            if role == OVERLAY:
                raise ValueError(f"a SIF file with an overlay; expected none. Try apptainer sif del {number} FILE.sif")
            if role == PRIMARY and file_system != SQUASHFS:
                contents = FILE_SYSTEMS.get(file_system, f"a file system of type {file_system}")
                raise ValueError(f"a SIF file whose root is {contents}; expected squashfs. {BUILD}, without --encrypt")
            offset = start if role == PRIMARY else offset
        if kind == IS_JSON and name.rstrip(b"\0") == OCI_CONFIG and size <= MOST_BYTES:
            file.seek(start)
            config = json.loads(_read(file, size))
            workdir = (config.get("WorkingDir") or "") if isinstance(config, dict) else ""
    if offset is None:
        form = "an OCI-SIF file" if any(part[0] == IS_OCI_INDEX for part in parts) else "a SIF file without a root file system"
        raise ValueError(f"{form}; expected one with a squashfs partition. {BUILD}")
    return RootPartition(offset, workdir)


def _read(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise ValueError(f"a SIF file whose end is missing. Try to copy it again, or {BUILD[4:]}")
    return content
