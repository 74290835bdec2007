"""Commands that read a run folder obtain its key: from a variable, or as its recipe says."""

import os

import pytest

from launch.pages import rollouts
from launch.runs import run_keys
from pipeline.encryption.key import obtain as obtain_key
from pipeline.files.stored_files import encrypt
from pipeline.recipe.problems import RecipeError
from tests.launch import made_runs

ENABLED = "checkpointing.encryption.enabled=true"
SECRET = "ab" * 32


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "run.key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def made(tmp_path, *overrides: str):
    return made_runs.folder(tmp_path / "run", "tiny_grpo", ENABLED, *overrides)


def test_the_variable_goes_before_the_recipe_and_is_named(tmp_path, key, monkeypatch):
    run = made(tmp_path, f"checkpointing.encryption.key_file={tmp_path}/not_here.key")
    monkeypatch.setenv(run_keys.VARIABLE, str(key))
    assert run_keys.key_of(run) is not None
    monkeypatch.setenv(run_keys.VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(RecipeError, match=f"^HETSTEP_KEY_FILE: got {tmp_path}/nothing"):
        run_keys.key_of(run)


def test_a_command_of_another_users_run_is_not_started(tmp_path, key, monkeypatch):
    run = made(tmp_path, f"checkpointing.encryption.key_command=cat {key}")
    own = run_keys.key_of(run)
    assert own is not None
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RecipeError, match=r"got a command from a run of .*; expected your own run"):
        run_keys.key_of(run)


@pytest.mark.parametrize("source", ["key_file=/nowhere/key", "key_command=/bin/false", "key_command=/nowhere/program"])
def test_a_report_names_the_rollouts_that_no_key_opens(tmp_path, key, source):
    run = made(tmp_path, f"checkpointing.encryption.{source}")
    (run / "rollouts").mkdir(exist_ok=True)
    content = encrypt(b"{}\n", obtain_key(str(key), None), "step_000001.jsonl")
    (run / "rollouts/step_000001.jsonl").write_bytes(content)
    left_out = rollouts.read([run]).left_out
    assert [source.partition("=")[0] in reason for reason in left_out] == [True]
