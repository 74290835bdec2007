"""Processes that Hetstep starts import no module from the working directory, where a user may have any files."""

import os
import subprocess
from pathlib import Path

import pytest

from launch.executors import local, slurm
from launch.preflight import user_imports
from pipeline import config
from pipeline.config import ClusterConfig, ComponentConfig
from pipeline.environments.math import _Reader
from pipeline.rollout.judges.parent_process import ParentProcess
from pipeline.store.child_process import start
from tests.launch.model import write_recipe
from tests.launch.waiting import wait_until


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Return a working directory with files that have names of standard library modules."""
    for name in ("json", "signal", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_reader_of_expected_answers():
    reader = _Reader()
    assert reader.is_expression("x^2")
    reader.kill()


def test_the_environments_process():
    process = ParentProcess.spawn()
    process.connection.close()  # it then ends by itself
    ended = [0, 0]

    def has_ended() -> bool:
        ended[:] = os.waitpid(process.pid, os.WNOHANG)
        return ended[0] == process.pid

    wait_until(has_ended, "the end of the environments' process")
    assert ended == [process.pid, 0]


def test_the_store():
    process, address = start("127.0.0.1", bytes(16))
    assert address.port
    process.kill()
    process.communicate()


def test_the_probe_of_the_users_code(here):
    folder = here / "recipes"
    folder.mkdir()
    (folder / "mine.py").write_text("class Mine: pass\n")
    recipe = config.load(str(write_recipe(folder)))
    named = user_imports.CodeReference("env.math.kind", "mine.Mine", "environment", "generate")
    recipe.module_folders = [str(folder)]
    assert "wrong" in user_imports._probe(recipe, [named])[named.key]


def test_ranks_and_their_controller(here):
    """Each ends after its imports, for lack of a run folder."""
    rank = subprocess.run(local.rank_command(here / "none"), capture_output=True, text=True, timeout=60)
    assert rank.returncode == 1 and "KeyError: 'HETSTEP_RANK'" in rank.stderr, rank
    assert local.start_controller(here / "none", dict(os.environ), here / "log").wait(60) == 1
    assert "FileNotFoundError" in (here / "log").read_text()
    script = slurm.batch_script(here, "a", ClusterConfig(), {"train": ComponentConfig()})
    assert " -P -u -m launch.executors.rank_task " in script
