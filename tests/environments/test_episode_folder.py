"""Folders of episodes whose processes were killed."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.environments import episode_folder
from tests.sandbox.hosts import until

MAKER = """
import time
from pipeline.environments.episode_folder import EpisodeFolder
folder = EpisodeFolder()
print(folder.path, flush=True)
time.sleep(100)
"""


def test_the_next_start_removes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also those with folders to which nobody may write. Folders of living processes, and of other nodes, stay."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    unlocked, young, elsewhere = f".{episode_folder.PREFIX}a", f".{episode_folder.PREFIX}b", "hetstep-episode-00000000-c"
    for name in (unlocked, young, elsewhere):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / unlocked, times=(time.time() - 120, time.time() - 120))
    monkeypatch.setattr(episode_folder.tempfile, "tempdir", None)
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKER], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        killed, alive = (Path(maker.stdout.readline().decode().strip()) for maker in makers if maker.stdout)
        assert killed.parent == alive.parent == tmp_path and killed.stat().st_mode & 0o777 == 0o700
        (killed / "cache/module").mkdir(parents=True)
        (killed / "cache/module").chmod(0o555)
        makers[0].kill()
        makers[0].wait()
        episode_folder.remove_left()
        until(lambda: not (killed.exists() or (tmp_path / unlocked).exists()) or None)
        assert {path.name for path in tmp_path.iterdir()} == {alive.name, young, elsewhere}
    finally:
        for maker in makers:
            maker.kill()
            maker.wait()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is left, and the error says what to change."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(episode_folder.fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=f"{tmp_path}: folders cannot be locked there: .*Try TMPDIR"):
        episode_folder.EpisodeFolder(str(tmp_path))
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == len(before)
