"""SIF files that Apptainer makes, and those that are refused."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.sandbox import container, sif
from pipeline.sandbox.image import ImageError, read_image
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from tests.sandbox.images import layout
from tests.sandbox.test_containers import path_of
from tests.slurm import apptainer

DEFINITION = """Bootstrap: oci
From: {}

%environment
    export B="$A, and more"
"""


@pytest.fixture(scope="module")
def image(image_root: Path, image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a SIF file from an OCI layout."""
    if apptainer.program() is None:
        pytest.skip("neither apptainer nor singularity is installed")
    folder = tmp_path_factory.mktemp("sif")
    (folder / "def").write_text(
        DEFINITION.format(layout(folder / "oci", image_root, Env=["A=of the image"], WorkingDir="/opt"))
    )
    path = image_folder / "image.sif"
    built = apptainer.run("build", "--mksquashfs-args", "-noI -noD -noF", str(path), str(folder / "def"))
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.parametrize("by", ["squashfuse", "unsquashfs"])
def test_a_file_of_apptainer(image: Path, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its variables are those that Apptainer's scripts set, its folder is that of the OCI image."""
    if by == "unsquashfs":
        monkeypatch.setenv("PATH", path_of(tmp_path, by))
        monkeypatch.setattr(container, "_servers", [])
    with Sandbox(ResourceLimits(wall_s=20.0, memory_bytes=256 << 20)).open(str(image)) as made:
        ran = made.run(["sh", "-c", 'pwd; echo $B; cat kept/file; echo x > /usr/new; test -n "$PATH" && echo $HOME'])
    assert (ran.status, ran.stdout) == (0, b"/opt\nof the image, and more\nof opt/kept\n/root\n"), ran


def _table(content: bytearray) -> list[int]:
    """Return the places of a file's descriptors."""
    _, count, table, _ = sif.HEADER.unpack_from(content, sif.HEADER_AT)
    return [table + number * sif.DESCRIPTOR.size for number in range(count)]


def _partition(content: bytearray) -> int:
    """Return the place of the partition's descriptor."""
    return next(at for at in _table(content) if sif.DESCRIPTOR.unpack_from(content, at)[0] == sif.IS_PARTITION)


def _of_partition(file_system: int, role: int) -> Callable[[bytearray], object]:
    """Return what changes the file system and the role of a file's partition."""
    return lambda content: sif.PARTITION.pack_into(content, _partition(content) + sif.DESCRIPTOR.size - 384, file_system, role)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_of_partition(5, sif.PRIMARY), "whose root is encrypted squashfs; expected squashfs"),
        (_of_partition(2, sif.PRIMARY), "whose root is ext3; expected squashfs"),
        (_of_partition(7, sif.PRIMARY), "whose root is a file system of type 7"),
        (_of_partition(2, sif.OVERLAY), "with an overlay; expected none"),
        (_of_partition(sif.SQUASHFS, 3), "a SIF file without a root file system"),
        (lambda content: struct.pack_into("<i", content, _partition(content), sif.IS_OCI_INDEX), "an OCI-SIF file"),
        (lambda content: content.__delitem__(slice(-(1 << 20), None)), "whose end is missing"),
        (lambda content: content.__delitem__(slice(100, None)), "whose end is missing"),
        (lambda content: sif.HEADER.pack_into(content, sif.HEADER_AT, 0, 1 << 40, 0, 0), "a damaged SIF file"),
    ],
)
def test_what_is_refused(image: Path, tmp_path: Path, change: Callable[[bytearray], object], error: str):
    content = bytearray(image.read_bytes())
    change(content)
    (tmp_path / "changed.sif").write_bytes(content)
    with pytest.raises(ImageError, match=f"image: got .*changed.sif, .*{error}.* Try "):
        read_image(str(tmp_path / "changed.sif"))
