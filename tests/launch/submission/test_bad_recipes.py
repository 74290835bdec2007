"""The real command reports all of a recipe's errors at once: status 2, nothing created or submitted."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from launch import submit
from launch.executors.executor import ROOT
from launch.submission import prepare
from pipeline import config
from pipeline.config import collected
from tests.launch.model import write_data, write_model, write_recipe, write_weights
from tests.problems import named, refused

SUBMIT = ROOT / "launch/submit.py"
HELP = "for cause and cure: python launch/submit.py help="
TENSOR_PARALLEL = "policy.generation.vllm_cfg.tensor_parallel_size"


def refuse(folder: Path, *overrides: str, recipe: str | None = None, path: str | None = None, count: int = 1) -> str:
    """Submit `folder`/tiny.yaml from `folder`; return the message of its refusal, which has `count` problems.

    The folder must be as it was. Runs in this process; `test_the_real_command` does the same in one of its own.
    """
    environment = surroundings(folder, path)
    before = sorted(folder.rglob("*"))
    out, err = io.StringIO(), io.StringIO()
    sigterm = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.callback(signal.signal, signal.SIGTERM, sigterm)
        status = submit.main([f"recipe={recipe or folder / 'tiny.yaml'}", *overrides])
    return refusal(folder, before, status, out.getvalue(), err.getvalue(), count)


def surroundings(folder: Path, path: str | None = None) -> dict[str, str]:
    """Return environment variables with an sbatch that leaves a file when it is called."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "sbatch").write_text(f"#!/bin/sh\ntouch '{folder}/submitted'\n")
    (bin_folder / "sbatch").chmod(0o755)
    return {"PATH": path or f"{bin_folder}:{os.environ['PATH']}", "HF_HOME": str(folder / "hf")}


def refusal(folder: Path, before: list[Path], status: int, out: str, err: str, count: int) -> str:
    """Return the message, after checking that it is a refusal of `count` problems and that `folder` is as `before`."""
    assert status == 2, out + err
    assert out == ""
    assert err.startswith("error: ") and "Traceback" not in err
    assert len(told(err)) == count, err
    assert sorted(folder.rglob("*")) == before
    return err


def told(message: str) -> list[str]:
    """Return the problems of an error: one after `error: `, more as a list below it. A problem may have further lines."""
    first, *rest = message.removeprefix("error: ").strip().replace("\n      ", " ").splitlines()
    if rest:
        assert rest.pop().startswith(HELP)
    return [line.removeprefix("  - ") for line in rest] if rest else [first]


def test_the_real_command(tmp_path):
    write_recipe(tmp_path)
    environment = {**os.environ, **surroundings(tmp_path)}
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, str(SUBMIT), f"recipe={tmp_path / 'tiny.yaml'}", "grpo.max_num_step=5", "env.math.kind=poetry"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    message = refusal(tmp_path, before, answer.returncode, answer.stdout, answer.stderr, count=2)
    assert "did you mean 'grpo.max_num_steps'" in message


@pytest.mark.parametrize(
    ("override", "key", "code"),
    [
        ("grpo.max_num_step=5", "grpo.max_num_step", "unknown-key"),
        ("grpo.max_num_steps=many", "grpo.max_num_steps", "wrong-type"),
        ("detach=perhaps", "detach", "wrong-type"),
        ("policy.train_global_batch_size=3", "policy.train_global_batch_size", "not-divisible"),
        ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.tensor_parallel_size", "not-divisible"),
        ("policy.max_total_sequence_length=65", "policy.max_total_sequence_length", "too-large"),
        ("data.max_input_seq_length=3", "data.train.data_path", "too-large"),
        ("policy.max_total_sequence_length=4", "data.train.data_path", "too-large"),
        ("data.train.data_path=no.jsonl", "data.train.data_path", "file-not-found"),
        ("data.train.input_key=question", "data.train.data_path", "bad-record"),
        ("data.train.prompt_file=no.txt", "data.train.prompt_file", "file-not-found"),
        ("data.train.system_prompt_file=tiny.yaml", "data.train.system_prompt_file", "contradiction"),
        ("data.apply_chat_template=true", "data.apply_chat_template", "missing-value"),
        ("data.train.prompt_file=tiny.yaml", "data.train.prompt_file", "bad-format"),
        ("env.math.kind=poetry", "env.math.kind", "not-a-choice"),
        ("policy.model_name=./nowhere", "policy.model_name", "file-not-found"),
        ("policy.model_name=some/model", "policy.model_name", "unavailable-model"),
        ("policy.model_name=hf_or_not", "policy.model_name", "file-not-found"),
        ("policy.random_init=false", "policy.model_name", "file-not-found"),
        ("needs=[nothing]", "needs", "file-not-found"),
        ("run_dir=data.jsonl", "run_dir", "not-a-folder"),
        ("run_dir=/proc/nobody/may", "run_dir", "unwritable"),
    ],
)
def test_one_wrong_key_is_refused(tmp_path, override, key, code):
    write_recipe(tmp_path)
    message = refuse(tmp_path, override)
    assert f"{key}: " in message and message.rstrip().endswith(f"[{code}]")


def test_tensor_parallel_size_that_does_not_divide_the_heads(tmp_path):
    write_recipe(tmp_path)
    message = refuse(tmp_path, "cluster.generate.ranks_per_node=3", f"{TENSOR_PARALLEL}=3")
    assert f"{TENSOR_PARALLEL}: got 3; expected one of 1, 2, 4, which fit the model's 4 attention heads" in message
    train = ("cluster.train.ranks_per_node=8", "policy.dtensor_cfg.tensor_parallel_size=8")  # no rank may hold half a head
    assert "policy.dtensor_cfg.tensor_parallel_size: got 8; expected one of 1, 2, 4, which fit" in refuse(tmp_path, *train)


def test_generate_world_that_tensor_parallel_does_not_divide(tmp_path):
    write_recipe(tmp_path)
    message = refuse(tmp_path, "cluster.generate.ranks_per_node=3", f"{TENSOR_PARALLEL}=2")
    assert f"{TENSOR_PARALLEL}: " in message and "[not-divisible]" in message


def test_a_missing_shard_is_refused(tmp_path):
    write_recipe(tmp_path)
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "model/model-1.safetensors").touch()
    message = refuse(tmp_path, "policy.random_init=false", count=2)
    assert "model-1.safetensors is empty" in message and "model-2.safetensors is missing" in message


def test_a_missing_tokenizer_is_refused(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "model/tokenizer.json").unlink()
    assert "policy.tokenizer.name" in (message := refuse(tmp_path)) and "has no tokenizer" in message


@pytest.mark.parametrize(("line", "says"), [('{"input": "a", ', "data.jsonl:3: not JSON"), ("[1]", "data.jsonl:3: got a list")])
def test_a_malformed_data_file_is_refused(tmp_path, line, says):
    write_recipe(tmp_path)
    with open(tmp_path / "data.jsonl", "a") as file:
        file.write(line + "\n")
    assert says in refuse(tmp_path)


def test_malformed_messages_are_refused(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"chat": [{"role": "user"}]}\n')
    chat = [
        "data.train.messages_key=chat",
        "data.apply_chat_template=true",
        "policy.tokenizer.chat_template='{{ messages[0].content }}'",
    ]
    assert "data.jsonl:1: 'chat' is not a list of {role, content}" in refuse(tmp_path, *chat)
    assert (
        f"data.train.system_prompt_file: {tmp_path}/no.txt: No such file or directory. Try a path from the recipe's"
        in refuse(tmp_path, *chat, "data.train.system_prompt_file=no.txt", count=2)
    )


def test_a_missing_data_set_is_refused(tmp_path):
    write_recipe(tmp_path, data={"apply_chat_template": False, "train": {"dataset_name": "some/data", "env_name": "math"}})
    message = refuse(tmp_path)
    assert "data.train.dataset_name: got 'some/data'" in message and "hf download --repo-type dataset some/data" in message


def test_each_of_several_data_sets_is_checked(tmp_path):
    """Check a missing file, a file whose lines lack the input, and an unknown data set."""
    several = {
        "here": {"data_path": "data.jsonl", "env_name": "math"},
        "gone": {"data_path": "no.jsonl", "env_name": "math"},
        "odd": {"data_path": "data.jsonl", "env_name": "math", "input_key": "question"},
    }
    validated = {"nowhere": {"dataset_name": "some/data", "env_name": "math"}}
    write_recipe(tmp_path, data={"apply_chat_template": False, "train": None, "datasets": several, "validations": validated})
    message = refuse(tmp_path, count=3)
    assert "data.datasets.gone.data_path" in message
    assert f"data.datasets.odd.data_path: {tmp_path}/data.jsonl:1: no column 'question'" in message
    assert "data.validations.nowhere.dataset_name: got 'some/data'" in message


def test_the_folder_of_another_recipe_is_refused(tmp_path):
    write_recipe(tmp_path, grpo={"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "seed": 1})
    from pipeline import config

    (tmp_path / "run").mkdir()
    config.write(config.load(str(tmp_path / "tiny.yaml"), ["policy.dtensor_cfg.enabled=true"]), tmp_path / "run/recipe.yaml")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "time": 1}\n')
    write_data(tmp_path / "other.jsonl", ["3+3="])
    assert "holds another recipe:\n      grpo.seed is 1 in the run and 2 in this recipe" in refuse(tmp_path, "grpo.seed=2")
    assert "data.train.data_path is" in refuse(tmp_path, "data.train.data_path=other.jsonl")


def test_a_missing_sbatch_is_refused(tmp_path):
    write_recipe(tmp_path)
    message = refuse(tmp_path, "cluster.executor=slurm", path=str(tmp_path))
    assert "cluster.executor: got slurm; Slurm is not installed here (there is no scontrol)" in message


def test_a_missing_recipe_is_refused(tmp_path):
    known = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    message = refuse(tmp_path, recipe="nothing_like_it")
    assert "recipe: got 'nothing_like_it'" in message
    assert [name for name in known if name not in message] == []


def test_a_recipe_without_an_equals_sign_is_refused(tmp_path):
    write_recipe(tmp_path)
    assert "grpo: is not key=value" in refuse(tmp_path, "grpo")


def test_a_cycle_of_needs_is_refused(tmp_path, monkeypatch):
    from launch.submission import prepare
    from pipeline.config import loading

    monkeypatch.setattr(loading, "RECIPES", tmp_path)
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, "first", needs=["second"])
    write_recipe(tmp_path, "second", needs=["first"])
    with refused(("needs", "circular")):
        prepare.prepare("first", [])


def test_prompts_too_long_with_their_prompt_file_and_numeric_inputs_are_refused(tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "prompt.txt").write_text("what is {} in me")
    (tmp_path / "data.jsonl").write_text('{"input": 7, "output": 1}\n{"input": 1234567, "output": 1}\n')
    message = refuse(tmp_path, "data.train.prompt_file=prompt.txt", "data.max_input_seq_length=14")
    assert "data.jsonl:2: a prompt of 21 tokens" in message


def test_the_model_of_a_needed_run_may_be_missing(tmp_path, monkeypatch):
    from launch.submission import prepare
    from pipeline.config import loading

    monkeypatch.setattr(loading, "RECIPES", tmp_path)
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, "base")
    policy = {"model_name": "runs/base/checkpoints/hf", "train_global_batch_size": 4, "max_total_sequence_length": 32}
    write_recipe(tmp_path, "second", needs=["base"], policy=policy)
    assert [planned.recipe.name for planned in prepare.prepare("second", [])] == ["base", "second"]

    write_model(tmp_path / "runs/base/checkpoints/hf")
    (tmp_path / "runs/base/done.json").write_text('{"step": 3}')
    with refused(("policy.model_name", "file-not-found")):  # now it is looked for
        prepare.prepare("second", [])
    write_weights(tmp_path / "runs/base/checkpoints/hf")
    assert [planned.recipe.name for planned in prepare.prepare("second", [])] == ["second"]


def test_a_module_with_a_hyphen_is_named(tmp_path):
    for kind in ("my-reward.right", "my-reward.py", "./my-reward.py"):
        (problem,) = config.inspect(str(write_recipe(tmp_path)), [f"env.math.kind={kind}"]).problems
        assert (problem.key, problem.code) == ("env.math.kind", "not-a-choice")
        assert "hyphen" in problem.message and "my_reward.py" in problem.message


@pytest.mark.parametrize(
    ("first", "code"), [(b"PAR1", "unreadable"), (b"\x1f\x8b\x08", "unreadable"), (b"PK\x03\x04", "bad-format")]
)
def test_a_data_file_of_another_format_is_named_as_such(tmp_path, first, code):
    recipe = write_recipe(tmp_path)
    (tmp_path / "data.jsonl").write_bytes(first + bytes(100))
    with collected(found := []):
        found += prepare.examine(str(recipe), [], dry=True).all_problems
    assert named(found) == {("data.train.data_path", code)}
