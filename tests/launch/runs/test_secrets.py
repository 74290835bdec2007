"""Secrets are refused in recipes and kept out of written files; only its owner can access a run folder."""

import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from launch import submit
from launch.executors import executor
from launch.runs import run_setup
from launch.runs.run_setup import lock_run
from launch.sweeps.sweep_folder import SweepFolder
from pipeline import config
from pipeline.config import RecipeError
from pipeline.files.storage import write_durably
from pipeline.job.watchdog import Failure
from pipeline.recipe import secrets
from pipeline.store.auth import attempt_key
from tests.launch.model import write_recipe
from tests.problems import refused
from tests.world.secret import write_secret

HF = "hf_" + "aB3dE6gH" * 4
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_SECRET")
OTHERS = ("HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "MAX_TOKENS", "SECRETARY", "HF_HUB_DISABLE_IMPLICIT_TOKENS")


@pytest.fixture
def load(tmp_path):
    path = write_recipe(tmp_path)
    return lambda *overrides: config.load(str(path), [f"run_dir={tmp_path}/run", *overrides])


def test_names_of_secrets():
    assert all(secrets.is_secret(name) for name in VARIABLES)
    assert not any(secrets.is_secret(name) for name in OTHERS)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.train.env_vars={HF_TOKEN: anything}", "cluster.train.env_vars.HF_TOKEN"),
        ("cluster.generate.env_vars={VLLM_API_KEY: '1'}", "cluster.generate.env_vars.VLLM_API_KEY"),
        ("cluster.reward.env_vars={WANDB_API_KEY: '1'}", "cluster.reward.env_vars.WANDB_API_KEY"),
        (f"policy.generation.vllm_kwargs={{hf_token: {HF}}}", "policy.generation.vllm_kwargs.hf_token"),
        ("cluster.train.srun_args=['--export=ALL,WANDB_API_KEY=abc']", "cluster.train.srun_args.0"),
        ("cluster.generate.env_vars={GH: ghp_0123456789abcdefghijABCDEFGHIJ012345}", "cluster.generate.env_vars.GH"),
        ("cluster.generate.env_vars={OTHER: 'sk-proj-0123456789abcdefghij'}", "cluster.generate.env_vars.OTHER"),
        ("cluster.train.env_vars={OTHER: '${oc.env:SOME_PASSWORD}'}", "cluster.train.env_vars.OTHER"),
    ],
)
def test_a_recipe_with_a_secret_is_refused_without_printing_it(load, monkeypatch, override, key):
    monkeypatch.setenv("SOME_PASSWORD", "correct horse")
    with refused((key, "secret-in-recipe")) as error:
        run_setup.check(load(override))
    told = str(error.value)
    assert HF not in told and "ghp_" not in told and "sk-proj" not in told and "correct horse" not in told


def test_recipes_without_secrets_pass(load):
    run_setup.check(
        load(
            "policy.generation.max_new_tokens=12",
            "policy.generation.vllm_kwargs={eos_token: '</s>', hf_token: true}",
            "cluster.train.env_vars={TOKENIZERS_PARALLELISM: 'false', HF_TOKEN_PATH: /home/me/token}",
            "cluster.train.srun_args=['--export=ALL', '--mpi=none']",
        )
    )


def test_no_file_of_a_submission_has_a_secret(load, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", HF)
    recipe = load()
    run_dir = executor.Path(recipe.run_dir)
    with lock_run(run_dir):
        run_setup.prepare(recipe, run_dir, "#!/bin/bash\n")
        run_setup.append_manifest(run_dir, "local", "1", ["submit.py", f"x={HF}"])
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) >= 5 and not any(HF in path.read_text() for path in files)
    assert json.loads((run_dir / "manifest.json").read_text())[0]["command"] == "submit.py x=***"


def test_submits_output_has_no_secret(tmp_path, capsys):
    path = str(write_recipe(tmp_path))
    submit.main([f"recipe={path}", "show=true", f"policy.generation.vllm_kwargs={{hf_token: {HF}}}"])
    submit.main([f"recipe={path}", f"cluster.train.gpu={HF}"])
    told = capsys.readouterr()
    assert "hf_token: '***'" in told.out or "hf_token: ***" in told.out
    assert "***" in told.err and HF not in told.out + told.err


def test_failures_and_tracebacks_have_no_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_SECRET", "correct horse")
    Failure(0, "train", "n0", "step", "loss", "refused: correct horse").record(tmp_path)
    assert json.loads((tmp_path / "failure.json").read_text())["message"] == "refused: ***"


# ---- the folder ---------------------------------------------------------------------------------------------------------


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_folder_is_private_to_its_owner(tmp_path):
    run_dir = tmp_path / "runs/a"
    before = os.umask(0o002)
    try:
        with lock_run(run_dir):
            (run_dir / "file").write_text("")
    finally:
        os.umask(before)
    assert (mode(run_dir), mode(run_dir / "submitit"), mode(run_dir / ".secret")) == (0o700, 0o700, 0o600)
    assert mode(tmp_path / "runs") == 0o775 and mode(run_dir / "file") == 0o644
    secret = (run_dir / ".secret").read_text()
    assert len(bytes.fromhex(secret)) == 32
    with lock_run(run_dir):
        assert (run_dir / ".secret").read_text() == secret


def test_the_owner_may_allow_others_to_read_but_not_to_write(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o770)
    with lock_run(run_dir):
        assert mode(run_dir) == 0o750
    assert f"# {run_dir}: its mode was 0770; others may no longer write there" in capsys.readouterr().out


def test_a_secret_readable_by_others_is_replaced(tmp_path):
    with lock_run(tmp_path):
        known = (tmp_path / ".secret").read_text()
    (tmp_path / ".secret").chmod(0o644)
    with lock_run(tmp_path):
        assert (tmp_path / ".secret").read_text() != known
    assert mode(tmp_path / ".secret") == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(tmp_path):
    os.chown(tmp_path, 65534, -1)
    with refused(("run_dir", "permission-denied")), lock_run(tmp_path):
        pass


def test_a_rank_loads_no_code_that_others_could_have_written(tmp_path):
    folder = tmp_path / "submitit"
    folder.mkdir(mode=0o700)
    pickle = folder / "7_submitted.pkl"
    pickle.write_bytes(b"")
    for path in (tmp_path, folder, pickle):
        before = mode(path)
        path.chmod(before | 0o020)
        with pytest.raises(PermissionError, match="expected a file that only user"):
            executor.own_pickle(folder, "7")
        path.chmod(before & ~0o022)
    executor.own_pickle(folder, "7")


def test_a_ranks_log_has_no_secrets(tmp_path):
    program = """
import logging, os, sys, warnings
from pipeline.files import rank_log
rank_log.set_up()
print("printed", os.environ["HF_TOKEN"])
logging.getLogger("x").warning("logged %s", os.environ["HF_TOKEN"])
logging.getLogger("pipeline.x").info("noted %s", os.environ["HF_TOKEN"])
warnings.warn("warned " + os.environ["HF_TOKEN"])
assert sys.stdout.fileno() == 1 and not sys.stderr.isatty()
print("another one: hf_" + "x" * 20)
raise ValueError(os.environ["HF_TOKEN"])
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "HF_TOKEN": "correct horse"}
    )
    text = answer.stdout + answer.stderr
    assert "correct horse" not in text and "hf_xx" not in text
    for said in ("printed ***", "logged ***", "noted ***", "warned ***", "ValueError: ***", "another one: ***"):
        assert said in text


# ---- files of other users -----------------------------------------------------------------------------------------------


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def refuse_lock(hold, folder, code="permission-denied"):
    with pytest.raises(RecipeError) as error, hold(folder):
        pass
    assert {problem.code for problem in error.value.problems} == {code}


@pytest.mark.parametrize("hold", [lock_run, lambda path: SweepFolder(path).locked()], ids=["run", "sweep"])
def test_a_lock_that_is_a_link_or_a_pipe_is_refused(tmp_path, hold):
    """The link's target is not truncated."""
    folder, precious = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    (folder / ".lock").symlink_to(precious)
    refuse_lock(hold, folder)
    (folder / ".lock").unlink()
    os.link(precious, folder / ".lock")
    with hold(folder):
        pass
    assert precious.read_text() == "precious"
    (folder / ".lock").unlink()
    os.mkfifo(folder / ".lock")
    refuse_lock(hold, folder, "unwritable")


@as_root
@pytest.mark.parametrize("hold", [lock_run, lambda path: SweepFolder(path).locked()], ids=["run", "sweep"])
def test_another_users_lock_is_refused(tmp_path, hold):
    (tmp_path / ".lock").touch()
    os.chown(tmp_path / ".lock", NOBODY, -1)
    refuse_lock(hold, tmp_path)


@as_root
@pytest.mark.parametrize("name", ["checkpoints", "attempts", "metrics.jsonl", "submitit"])
@pytest.mark.parametrize("kind", ["link", "own"])
def test_another_users_files_in_the_folder_are_refused(tmp_path, name, kind):
    """Another user could still write into a folder of theirs, and choose where their link points."""
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    if kind == "link":
        (run_dir / name).symlink_to(elsewhere)
    else:
        (run_dir / name).mkdir()
    os.chown(run_dir / name, NOBODY, -1, follow_symlinks=False)
    refuse_lock(lock_run, run_dir)


@as_root
def test_a_run_folder_behind_another_users_link_is_refused_and_behind_ones_own_is_not(tmp_path):
    (tmp_path / "mine").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "mine")
    with lock_run(link):
        pass
    os.chown(link, NOBODY, -1, follow_symlinks=False)
    refuse_lock(lock_run, link)


def test_a_secret_behind_a_link_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    write_secret(tmp_path)
    (tmp_path / "run/.secret").symlink_to(tmp_path / ".secret")
    with pytest.raises(PermissionError, match=r"\.secret is a symbolic link"):
        attempt_key(tmp_path / "run", "1")


@as_root
def test_another_users_secret_is_refused(tmp_path):
    """Root could read it, which would let its owner join the run."""
    write_secret(tmp_path)
    os.chown(tmp_path / ".secret", NOBODY, -1)
    with pytest.raises(PermissionError, match=r"\.secret belongs to nobody, not to you"):
        attempt_key(tmp_path, "1")


@as_root
def test_a_secret_is_not_written_into_another_users_file(tmp_path):
    """The file has the temporary name of the secret."""
    theirs = tmp_path / f"..secret.{socket.gethostname()}-{os.getpid()}"
    theirs.touch()
    os.chown(theirs, NOBODY, -1)
    with open(theirs) as held:
        write_durably(tmp_path / ".secret", "x", mode=0o600)
        assert held.read() == ""
    assert (tmp_path / ".secret").stat().st_uid == os.geteuid()
    theirs.symlink_to(tmp_path / "precious")
    write_durably(tmp_path / ".secret", "y", mode=0o600)
    assert (tmp_path / ".secret").read_text() == "y" and not (tmp_path / "precious").exists()
