"""Files that a user or a recipe names: regular ones only, within bounds."""

import json
import os
import socket
import subprocess
import sys

import pytest

from launch import submit
from launch.executors.executor import ROOT
from launch.preflight import data_files
from launch.recipes import reading
from launch.recipes.model_files import read_json
from pipeline.config import hardware
from pipeline.data.file_formats import FileFormat
from pipeline.data.file_tokenizer import read_tokenizer
from pipeline.data.text_records import TextRecords
from pipeline.encryption.key import obtain
from pipeline.environments.judge_prompts import JudgePrompt
from pipeline.files.digests import sha256
from pipeline.models.weight_files import file_fault
from pipeline.recipe import user_files
from pipeline.recipe.problems import RecipeError
from tests.launch.preflight.test_user_imports import SMALL
from tests.problems import refused


@pytest.fixture(params=["device", "pipe", "socket", "folder"])
def special(request, tmp_path):
    """Return the path of something that is no regular file, under a name that any reader takes."""
    path = tmp_path / "special.yaml"
    if request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path.mkdir()
    return path


def json_lines(path):
    return TextRecords(path, FileFormat("jsonl"))


def test_readers_refuse_what_is_no_regular_file(special):
    for read in (user_files.open_file, user_files.read_bytes, user_files.read_text, json_lines, sha256):
        with pytest.raises(OSError, match="expected a regular file"):
            read(special)
    with refused(("data.train.data_path", "unreadable")):
        data_files.of_file("data.train.data_path", special)
    with pytest.raises(RecipeError):
        reading.load(str(special))
    with pytest.raises(RecipeError):
        hardware.gpu(str(special))
    with pytest.raises(RecipeError):
        obtain(str(special), None)
    with pytest.raises(RecipeError):
        JudgePrompt.of_file("evaluate.tasks.x.judge_prompt_file", str(special), "", ())
    assert file_fault(special) is not None


@pytest.mark.parametrize("key", ["data_path", "prompt_file", "system_prompt_file"])
def test_submission_refuses_it(special, key, capsys):
    given = [f"data.train.{key}={special}", f"data.validation.{key}={special}"]
    assert submit.main(["recipe=tiny_sft", "dry_run=true", "cluster.executor=local", *given]) == 2
    assert f"data.train.{key}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_submission_refuses_it_in_a_model_folder(tmp_path, name, capsys):
    for path in (ROOT / "recipes/tiny").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    given = [f"policy.model_name={tmp_path}", f"policy.random_init={str(name != 'model.safetensors').lower()}"]
    assert submit.main(["recipe=tiny_grpo", "dry_run=true", *SMALL, *given]) == 2
    assert name in capsys.readouterr().err


def test_a_pipe_that_replaces_a_file_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    monkeypatch.setattr(user_files.os, "stat", lambda path: os.lstat(tmp_path / "file"))
    with pytest.raises(OSError, match="expected a regular file"):
        user_files.open_file(tmp_path / "pipe")


def test_bounds(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1234\n12345\r\nx")
    assert user_files.read_text(path, 13) == "1234\n12345\nx"
    with pytest.raises(OSError, match="more than 11 bytes"):
        user_files.read_bytes(path, 11)


ENDLESS = """\
import re, sys
from launch import submit
status = submit.main(sys.argv[1:])
print(status, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])  # ru_maxrss would be the parent's
"""


@pytest.mark.parametrize("content", ["endless", pytest.param("lists", marks=pytest.mark.full)])
def test_memory_stays_below_a_gigabyte(tmp_path, content):
    """An endless line, and lines whose records are the largest in memory for their bytes."""
    path = tmp_path / "rows.jsonl"
    if content == "endless":
        with path.open("wb") as file:
            file.truncate(20 << 30)  # zeros that take no room on the disk
    else:
        path.write_text(('{"input": [' + ",".join(["[{}]"] * 200_000) + "]}\n") * 20)
    command = ["recipe=tiny_sft", "dry_run=true", "cluster.executor=local", f"data.train.data_path={path}"]
    program = [sys.executable, "-c", ENDLESS, *command]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=True, timeout=300)
    status, kilobytes = map(int, ended.stdout.split()[-2:])
    assert status == 2 and kilobytes < 1_000_000, ended


def test_the_job_refuses_an_endless_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input": "1+1=", "answer": "2"}) + "\n")
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(OSError, match="line 2 has more than 64 MB"):
        json_lines(path)


@pytest.mark.parametrize(("read", "most"), [(read_json, user_files.MAX_TEXT), (read_tokenizer, user_files.MAX_JSON)])
def test_files_of_a_model_are_bounded(tmp_path, read, most):
    """A JSON file of 180 MB, such as a generation_config.json of empty lists, takes 5 GB and minutes."""
    path = tmp_path / "large.json"
    path.touch()
    os.truncate(path, most + 1)
    with refused((str(path), "unreadable")):
        read(path)
