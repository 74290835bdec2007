"""A power cut leaves a file's bytes, and a folder's names, as they were last synced."""

import os
import stat
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints.checkpoint import COMPLETE, Checkpoints
from pipeline.config import CheckpointingConfig
from pipeline.files.storage import append, write_durably
from pipeline.train.shards import Shards


class SyncedDisk:
    """Records, at each `os.fsync`, the content of the file or folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._bytes: dict[int, bytes] = {}  # by inode
        self._names: dict[int, dict[str, int]] = {}  # inode of each name in a folder, by the folder's inode
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path, status = Path(f"/proc/self/fd/{descriptor}").resolve(), os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {name: (path / name).stat().st_ino for name in os.listdir(path)}
        else:
            self._bytes[status.st_ino] = path.read_bytes()

    def after_power_cut(self, folder: Path) -> dict[str, bytes]:
        """Return the files that are left in a folder, by their paths in it. A file without synced bytes is empty."""
        return self._left(folder.stat().st_ino, "")

    def _left(self, inode: int, at: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, entry in self._names.get(inode, {}).items():
            found |= self._left(entry, f"{at}{name}/") if entry in self._names else {at + name: self._bytes.get(entry, b"")}
        return found


@pytest.fixture
def disk(monkeypatch):
    return SyncedDisk(monkeypatch)


def test_a_durable_file_is_the_new_one(tmp_path, disk):
    path = tmp_path / "file"
    write_durably(path, "old")
    write_durably(path, "new")
    assert disk.after_power_cut(tmp_path) == {"file": b"new"}


def test_a_durable_append_keeps_every_byte(tmp_path, disk):
    path = tmp_path / "lines"
    write_durably(path, "one\n")
    size = append(path, 4, b"two\n")
    append(path, size, b"three\n", durable=False)
    assert disk.after_power_cut(tmp_path) == {"lines": b"one\ntwo\n"}


def test_a_committed_checkpoint_is_complete(tmp_path, disk):
    checkpoints = Checkpoints(tmp_path, "attempt", CheckpointingConfig(keep_top_k=None))
    partial = checkpoints.begin(1)
    checkpoints.keep_rollouts(partial, b"rollouts")
    Shards({"a": torch.arange(1000)}, {"ranks": 1}).write(partial, 0)
    checkpoint = checkpoints.commit(partial, 1, 0.5, {"stream": {"position": 1}})
    left = disk.after_power_cut(tmp_path / "checkpoints")
    assert left == {str(path.relative_to(tmp_path / "checkpoints")): path.read_bytes() for path in checkpoint.folder.iterdir()}
    assert {Path(name).name for name in left} >= {COMPLETE, "train-rank00000.safetensors", "train-rank00000.json"}
