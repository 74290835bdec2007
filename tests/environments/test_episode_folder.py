"""Folders of episodes whose processes were killed."""

import subprocess
import sys
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
    """Also those with folders to which nobody may write. Folders of living processes stay."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
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
        until(lambda: not killed.exists() or None)
        assert alive.exists() and len(list(tmp_path.iterdir())) == 1
    finally:
        for maker in makers:
            maker.kill()
            maker.wait()
