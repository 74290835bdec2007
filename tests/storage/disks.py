"""Disks that are small, full, read-only, slow or broken."""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("faulty.c")


class Disk:
    """A file system of its own, if this user may mount one."""

    def __init__(self, path: Path):
        self.path = path

    def fill(self, leave: int = 0) -> None:
        """Fill all but `leave` bytes, rounded down to whole pages."""
        status = os.statvfs(self.path)
        with open(self.path / "ballast", "ab") as ballast:
            ballast.write(bytes(max(0, status.f_bavail * status.f_frsize - leave)))

    def free(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.path)], check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str = "8m") -> Iterator[Disk]:
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("may not mount a file system here: the real full and read-only disks are not tested")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class Faults:
    """Switches faults of `faulty.c` on and off in the processes that load it before libc."""

    def __init__(self, file: Path):
        self._file = file

    @classmethod
    def of_environment(cls) -> "Faults":
        """Return this process's switches."""
        return cls(Path(os.environ["HETSTEP_TEST_FAULT_FILE"]))

    def none(self) -> None:
        self.set("0")

    def set(self, name: str, seconds: float = 0.0, reads: bool = False) -> None:
        """`name`: of an errno, or 0."""
        number = getattr(errno, name) if name != "0" else 0
        beside = self._file.with_name("fault.new")
        beside.write_text(f"{number} {seconds} {int(reads)}")
        beside.replace(self._file)


def faulty(folder: Path, disk: Path) -> dict[str, str]:
    """Return the environment of a process for which `disk` can be made to fail. Skips where there is no C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here: file systems that fail are not tested")
    library = folder / "faulty.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    control = {"HETSTEP_TEST_DISK": str(disk), "HETSTEP_TEST_FAULT_FILE": str(folder / "fault")}
    return {**os.environ, "LD_PRELOAD": str(library), **control}
