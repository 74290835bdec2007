"""Recognize the image of a container: a squashfs or SIF file, a folder with a root file system, or an OCI image layout.

    squashfs    a file, as `enroot import docker://IMAGE` writes, or part of a SIF file, of `apptainer build`
    folder      a root file system, as `debootstrap` or `enroot create` makes
    oci         a folder, as `skopeo copy docker://IMAGE oci:FOLDER:TAG` writes; FOLDER:TAG names one of several images

Leaves out: archives of `docker save`, and registries.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.sandbox import sif
from pipeline.sandbox.limits import SandboxError

SQUASHFS = b"hsqs"  # first bytes of a little-endian squashfs of version 4
LAYOUT, INDEX = "oci-layout", "index.json"  # image-spec/image-layout.md
REF = "org.opencontainers.image.ref.name"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
ADVICE = (
    "Try a squashfs file (enroot import docker://IMAGE), a SIF file (apptainer build FILE.sif docker://IMAGE), a folder with a"
    " root file system, or an OCI layout (skopeo copy docker://IMAGE oci:FOLDER)"
)


class ImageError(SandboxError):
    """Raised for an image that does not exist or that cannot be read."""


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """A layer of an OCI image."""

    blob: str  # its file
    key: str  # of this layer on top of those below it


@dataclass(frozen=True, slots=True)
class Image:
    """An image on disk."""

    form: Literal["squashfs", "folder", "oci"]
    path: str  # absolute
    key: str = ""  # of a file or folder in its present state
    offset: int = 0  # bytes before the squashfs in its file
    layers: list[ImageLayer] = field(default_factory=list)  # of an OCI image, the lowest first
    environment: dict[str, str] = field(default_factory=dict)  # of an OCI image
    workdir: str = ""  # of an OCI image, or of one that became a SIF file


def read_image(path: str) -> Image:
    """Return the image at an absolute path. Reads a few small files. Raises ImageError."""
    if not os.path.isabs(path):
        raise ImageError(f"image: got {path}; expected an absolute path. {ADVICE}")
    folder, _, tag = path.rpartition(":") if not os.path.exists(path) and ":" in path else (path, "", "")
    try:
        if os.path.isfile(folder):
            return _read_file(folder)
        if os.path.isfile(f"{folder}/{LAYOUT}"):
            return _read_layout(folder, tag)
        if any(os.path.isdir(f"{folder}/{name}") for name in ("bin", "usr/bin")):
            return Image("folder", folder, _state_key(folder))
    except OSError as error:
        raise ImageError(f"image: got {path}, which cannot be read: {error}") from None
    found = "a folder without bin, usr/bin or oci-layout" if os.path.isdir(folder) else "which does not exist"
    raise ImageError(f"image: got {path}, {found}. {ADVICE}")


def _read_file(path: str) -> Image:
    with open(path, "rb") as file:
        start = file.read(64)
        if start.startswith(SQUASHFS):
            return Image("squashfs", path, _state_key(path))
        if not sif.is_sif(start):
            raise ImageError(f"image: got {path}, a file that is no squashfs or SIF. {ADVICE}")
        try:
            offset, workdir = sif.root_partition(file)
        except ValueError as error:
            raise ImageError(f"image: got {path}, {error}") from None
    return Image("squashfs", path, _state_key(path), offset, workdir=workdir)


def _state_key(path: str) -> str:
    found = os.stat(path)
    return key_of(f"{os.path.realpath(path)} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}")


def key_of(text: str) -> str:
    """Return the key in the cache for what `text` identifies."""
    import hashlib  # here, since the container server's forks would copy OpenSSL

    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_layout(folder: str, tag: str) -> Image:
    try:
        entries = json.loads(Path(folder, INDEX).read_text())["manifests"]
        chosen = [entry for entry in entries if not tag or entry.get("annotations", {}).get(REF) == tag]
        if len(chosen) != 1:
            tags = ", ".join(entry.get("annotations", {}).get(REF, "?") for entry in entries)
            raise ImageError(f"image: got {folder}{':' * bool(tag)}{tag}; expected FOLDER:TAG with one of: {tags}")
        manifest = json.loads(Path(_blob(folder, chosen[0]["digest"])).read_text())
        if "manifests" in manifest:  # an index of one image for several machines
            wanted = ARCHITECTURES.get(platform.machine(), platform.machine())
            machines = {one.get("platform", {}).get("architecture"): one for one in manifest["manifests"]}
            if wanted not in machines:
                raise ImageError(f"image: got {folder}, for {', '.join(map(str, machines))}; expected one for {wanted}")
            manifest = json.loads(Path(_blob(folder, machines[wanted]["digest"])).read_text())
        config = json.loads(Path(_blob(folder, manifest["config"]["digest"])).read_text()).get("config") or {}
        layers: list[ImageLayer] = []
        for entry in manifest["layers"]:
            below = layers[-1].key if layers else ""
            layers.append(ImageLayer(_blob(folder, entry["digest"]), key_of(f"{below} {entry['digest']}")))
        variables = dict(line.split("=", 1) for line in config.get("Env") or [] if "=" in line)
        return Image("oci", folder, "", 0, layers, variables, config.get("WorkingDir") or "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"image: got {folder}, whose OCI layout is damaged: {error!r}") from None


def _blob(folder: str, digest: str) -> str:
    """Return the path of a blob. Raises ImageError if it does not exist."""
    algorithm, _, digits = digest.partition(":")
    if not (algorithm.isalnum() and digits.isalnum()):
        raise ValueError(f"digest {digest}")
    path = f"{folder}/blobs/{algorithm}/{digits}"
    if not os.path.isfile(path):
        raise ImageError(f"image: got {folder}, which lacks the blob {digest}. Try to copy the image again")
    return path
