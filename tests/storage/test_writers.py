"""Every writer on every kind of failing file system."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.runs import ROOT
from tests.storage.disks import Disk, faulty, small_disk

SYMBOL = {"full": "ENOSPC", "quota": "EDQUOT", "read-only": "EROFS", "no permission": "EACCES", "I/O error": "EIO"}
SYMBOL["stale handle"] = "ESTALE"


def cells(folder: Path, disk: Disk) -> Iterator[dict]:
    """Return the rows of `table.py`, which ends with an error if complete data is lost."""
    command = [sys.executable, "-m", "tests.storage.table", str(disk.path)]
    with subprocess.Popen(command, cwd=ROOT, env=faulty(folder, disk.path), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield {**json.loads(line), "folder": str(disk.path)}
    assert process.returncode == 0


@pytest.mark.long
def test_every_writer_on_every_failing_disk(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        rows = list(cells(tmp_path, disk))
        assert {cell["fault"] for cell in rows} >= {"slow", *SYMBOL}
        for cell in rows:
            where = f"{cell['writer']}, {cell['fault']}: {cell}"
            if cell["fault"] == "slow":
                assert not cell["error"], where
            elif cell["needed"] and not cell["writer"].startswith("recipe.yaml"):
                assert cell["error"].startswith("StorageError") and f"({SYMBOL[cell['fault']]})" in cell["error"], where
                assert "the same command then goes on from the last checkpoint" in cell["error"], where
            elif cell["needed"]:
                assert cell["error"].startswith("RecipeError: run_dir: ") and "cannot be written: " in cell["error"], where
            else:
                assert not cell["error"] and (cell["told"] or "how much was lost" in cell["kept"]), where
