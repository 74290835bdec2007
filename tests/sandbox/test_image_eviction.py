"""The bound on unpacked images: what is removed, what stays, and what kills leave."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.sandbox import container, image_cache
from pipeline.sandbox.image import read_image
from pipeline.sandbox.limits import ResourceLimits, SandboxError
from pipeline.sandbox.sandbox import Sandbox
from tests.sandbox.conftest import unusable
from tests.sandbox.hosts import until
from tests.sandbox.images import entry, layout, squashed
from tests.sandbox.test_containers import path_of
from tests.storage.disks import small_disk

ROOM = 2_500_000  # of two images
SMALL_DISK = f"from pipeline.sandbox import image_eviction; image_eviction._most_bytes = lambda *_: {ROOM}"
HOLDER = """
import sys, time
from pipeline.sandbox import container
from pipeline.sandbox.sandbox import Sandbox, ResourceLimits
container.MAIN = sys.argv[1]
made = Sandbox(ResourceLimits(wall_s=300.0)).open(sys.argv[2])
print("open", flush=True)
time.sleep(300)
"""


@pytest.fixture
def cache(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache on a disk with room for two images."""
    if reason := unusable():
        pytest.skip(reason)
    folder = image_folder / f"cache-{os.urandom(4).hex()}"
    monkeypatch.setenv(image_cache.VARIABLE, str(folder))
    monkeypatch.setattr(container, "_servers", [])
    main = container.MAIN.replace("container_server.main()", f"exec({SMALL_DISK!r}); container_server.main()")
    monkeypatch.setattr(container, "MAIN", main)
    return folder


def image(folder: Path, name: str, size: int = 1_000_000) -> Path:
    """Make an image with a folder to which nobody may write."""
    closed = entry("closed/", type=b"5", mode=0o555)
    return layout(folder / name, [entry("bin/", type=b"5", mode=0o755), closed, entry(f"closed/{name}", os.urandom(size))])


@pytest.mark.parametrize("form", ["squashfs", "oci"])
def test_a_full_disk(form: str, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Unused trees go if an image needs their space, and an image that does not fit is no tree."""
    if reason := unusable():
        pytest.skip(reason)

    def made(name: str, size: int) -> str:
        if form == "oci":
            return str(image(tmp_path, name, size))
        (folder := image_folder / f"full-{name}").mkdir()
        (folder / "file").write_bytes(os.urandom(size))
        return str(squashed(folder))

    first, second, third = made("first", 2_000_000), made("second", 8_000_000), made("third", 10_000_000)
    (tmp_path / "bin").mkdir()
    with small_disk(image_folder / f"disk-{form}", "9m") as disk, monkeypatch.context() as patch:
        (cache := disk.path / "cache").mkdir()
        patch.setenv(image_cache.VARIABLE, str(cache))
        patch.setenv("PATH", path_of(tmp_path / "bin", "unsquashfs"))  # and no squashfuse
        patch.setattr(container, "_servers", [])
        sandbox = Sandbox(ResourceLimits(wall_s=20.0))
        sandbox.open(first).close()
        with sandbox.open(second):
            (tree,) = (cache / "trees").iterdir()
            assert sum(file.stat().st_size for file in tree.rglob("*") if file.is_file()) == 8_000_000
        with pytest.raises(SandboxError, match=f"No space left.*Try {image_cache.VARIABLE}"):
            sandbox.open(third)
        assert not [*(cache / "trees").iterdir(), *(cache / "new").iterdir()]


def test_the_least_recently_used_goes(cache: Path, tmp_path: Path):
    """An image that another process uses stays, until the process is killed."""
    images = {name: image(tmp_path, name) for name in ("held", "old", "new", "third", "fourth")}
    keys = {read_image(str(path)).layers[0].key: name for name, path in images.items()}
    sandbox = Sandbox(ResourceLimits(wall_s=20.0))

    def unpacked() -> set[str]:
        return {keys[key] for key in os.listdir(cache / "trees")}

    command = [sys.executable, "-c", HOLDER, container.MAIN, str(images["held"])]
    holder = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline() == b"open\n"
        for name in ("old", "new"):
            sandbox.open(str(images[name])).close()
        until(lambda: unpacked() == {"held", "new"} or None)
        with sandbox.open(str(images["third"])) as one, sandbox.open(str(images["fourth"])) as other:
            assert unpacked() == {"held", "third", "fourth"}  # all in use
            assert len(one.read_file("/closed/third")) == len(other.read_file("/closed/fourth")) == 1_000_000
    finally:
        holder.kill()
        holder.wait()
    left = cache / "new" / f"{'0' * 32}.gone"  # of a process that was killed while it removed a tree
    (left / "closed").mkdir(parents=True)
    sandbox.open(str(images["old"])).close()
    until(lambda: "held" not in unpacked() or sandbox.open(str(images["new"])).close())  # the holder's server ends soon
    assert len(unpacked()) <= 2 and not os.listdir(cache / "new")
