"""Compiled code lies on the node, where only this user writes; a run starts where the home folder is read-only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.node import caches

ROOT = Path(__file__).parents[1]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder of temporary files; no variable of a cache is set."""
    for name in (*caches.FOLDERS, "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "tmp"


def test_caches_are_on_the_node_and_the_users_choice_stays(temporary, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    caches.use_node_folders()
    folder = temporary / f"hetstep-{os.getuid()}"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    assert os.environ["VLLM_CACHE_ROOT"] == str(folder / "vllm")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not {"XDG_CACHE_HOME", "HF_HOME"} & os.environ.keys()  # the home folder can be written
    assert caches.problem() == ""


def test_without_a_home_all_caches_move_but_hugging_faces_files_stay(temporary, monkeypatch, tmp_path):
    (tmp_path / "home").write_text("a file: nobody can write below it")
    caches.use_node_folders()
    assert os.environ["XDG_CACHE_HOME"] == str(temporary / f"hetstep-{os.getuid()}" / "cache")
    assert os.environ["HF_HOME"] == str(tmp_path / "home/.cache/huggingface")


def test_a_folder_that_others_can_write_holds_no_code(temporary):
    """Another user may have made it, to plant code there."""
    folder = temporary / f"hetstep-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert caches.node_folder() != folder
    folder.rmdir()
    folder.symlink_to(temporary)
    assert caches.node_folder() != folder


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
def test_a_file_system_without_execution_holds_no_code(temporary):
    mount = f"mount -t tmpfs -o noexec none {temporary} && {sys.executable} -c"
    program = "from pipeline.node import caches; print(caches.node_folder())"
    temporary.mkdir()
    answer = subprocess.run(
        ["unshare", "-m", "bash", "-c", f"{mount} '{program}'"], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() not in ("None", str(temporary / "hetstep-0"))


def test_a_folder_that_cannot_be_written_is_named(temporary, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file/vllm"))
    assert (
        caches.problem() == f"no file can be written to VLLM_CACHE_ROOT={tmp_path}/file/vllm, where compilers keep their output"
    )


def test_a_tilde_is_the_home_folder(temporary, monkeypatch, tmp_path):
    """Triton and Inductor would write to a folder of the name "~"."""
    for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, f"~/{name}")
    caches.use_node_folders()
    for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"):
        assert os.environ[name] == f"{tmp_path}/home/{name}"


def test_a_user_without_a_home_writes_nothing_to_a_folder_of_the_name_tilde(temporary, monkeypatch, tmp_path):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setenv("TRITON_CACHE_DIR", "~/triton")
    monkeypatch.chdir(tmp_path)
    caches.use_node_folders()
    assert caches.problem().startswith("no file can be written to TRITON_CACHE_DIR=~/triton,")
    assert os.environ["XDG_CACHE_HOME"] == str(temporary / f"hetstep-{os.getuid()}" / "cache")
    assert "HF_HOME" not in os.environ  # it follows XDG_CACHE_HOME
    assert not (tmp_path / "~").exists()


READ_ONLY = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount -o remount,ro,bind /
mount -t tmpfs none /var/tmp
if touch "$HOME/here" 2>/dev/null; then exit 77; fi
shift
TMPDIR=/var/tmp exec "$@"
"""


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
def test_a_run_of_vllm_starts_where_the_root_and_the_home_are_read_only(tmp_path):
    """Only the run's folder and temporary files in memory are writable, as in a container of enroot (conf/mounts)."""
    keys = [f"run_dir={tmp_path}/run", "cluster.executor=local", "policy.generation.backend=vllm", "grpo.max_num_steps=1"]
    ranks = ["cluster.train.ranks_per_node=1", "cluster.generate.ranks_per_node=1", "cluster.timeouts.silence=120"]
    compiled = "policy.generation.vllm_cfg.enforce_eager=false"
    command = [sys.executable, "launch/submit.py", "recipe=tests/end_to_end/recipe.yaml", *keys, *ranks, compiled]
    environment = {name: value for name, value in os.environ.items() if name not in (*caches.FOLDERS, "XDG_CACHE_HOME")}
    inside = ["unshare", "-m", "bash", "-c", READ_ONLY, "bash", str(tmp_path), *command]
    answer = subprocess.run(inside, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "done: step 1" in answer.stdout
