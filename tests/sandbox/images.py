"""Images for tests, made of this machine's own programs and libraries, without a registry and without root."""

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

PYTHON = "/usr/bin/python3"
"""The interpreter of images."""
PROGRAMS = "bash sh cat chmod chown cp env find grep head id ln ls mkdir mv nohup rm sed seq sleep tar touch true"
UNUSED = ("test", "__pycache__", "*-packages", "idlelib", "config-*", "pydoc_data", "lib2to3", "unittest", "tkinter")
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def make_root(folder: Path, more: str = "") -> Path:
    """Make a root file system with PYTHON, PROGRAMS and more of them."""
    for name in ("bin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("etc", "root", "tmp", "opt/kept", "opt/gone"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(f"of {name}\n")
    (folder / "tmp").chmod(0o1777)
    python = os.path.realpath(PYTHON)
    library = subprocess.check_output([PYTHON, "-I", "-c", "import os; print(os.path.dirname(os.__file__))"], text=True).strip()
    shutil.copytree(
        library,
        folder / library[1:],
        symlinks=True,
        ignore=shutil.ignore_patterns(*UNUSED),
    )
    files = [python, *filter(None, map(shutil.which, [*PROGRAMS.split(), *more.split()]))]
    needed = {
        library for path in [*files, *map(str, Path(library, "lib-dynload").glob("*.so"))] for library in _libraries(path)
    }
    for path in (*files, *needed):
        target = folder / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(path), target)
    (folder / "usr/bin/python3").symlink_to(os.path.basename(python))
    return folder


def _libraries(path: str) -> list[str]:
    return LIBRARY.findall(subprocess.run(["ldd", path], capture_output=True, text=True).stdout)


def squashed(folder: Path) -> Path:
    """Return a squashfs file of a root file system, beside it."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("mksquashfs is not installed")
    image = folder.with_suffix(".sqsh")
    subprocess.run(["mksquashfs", folder, image, "-quiet", "-no-progress", "-noI", "-noD", "-noF"], check=True, stdout=-3)
    return image


def entry(name: str, content: bytes | None = None, **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    """Return an entry of a layer: a regular file, or what `fields` say."""
    made = tarfile.TarInfo(name)
    made.mode, made.size = 0o644, len(content or b"")
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content


def layout(folder: Path, *layers: Path | list[tuple[tarfile.TarInfo, bytes | None]], **config: object) -> Path:
    """Make an OCI image layout. layers: a folder, or entries. config: of the image, such as Env."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]

    def blob(content: bytes, kind: str) -> dict:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    described = []
    for layer in layers:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as archive:
            if isinstance(layer, Path):
                archive.add(layer, ".")
            else:
                for made, content in layer:
                    archive.addfile(made, None if content is None else io.BytesIO(content))
        described.append(blob(*_compressed(raw.getvalue(), len(described))))
    configuration = blob(json.dumps({"architecture": machine, "os": "linux", "config": config}).encode(), "config.v1+json")
    manifest = blob(json.dumps({"schemaVersion": 2, "config": configuration, "layers": described}).encode(), "manifest.v1+json")
    named = {**manifest, "annotations": {"org.opencontainers.image.ref.name": "latest"}}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def _compressed(content: bytes, number: int) -> tuple[bytes, str]:
    """Return a layer's bytes and the end of its media type: the first as it is, then by gzip, then by zstd."""
    if number == 0:
        return content, "layer.v1.tar"
    if number == 1 or shutil.which("zstd") is None:
        return gzip.compress(content, 1), "layer.v1.tar+gzip"
    return subprocess.run(["zstd", "-qc"], input=content, capture_output=True, check=True).stdout, "layer.v1.tar+zstd"
