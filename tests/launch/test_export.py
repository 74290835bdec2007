"""`python launch/export.py`: its command line, its output, and its errors."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import export
from launch.executors.executor import ROOT
from pipeline import config
from pipeline.checkpoints.checkpoint import Checkpoints
from tests.launch.model import write_recipe
from tests.train import cases, model_roles, ranks

FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Write a run folder with checkpoints of steps 3 and 20, saved by two ranks."""
    folder = tmp_path_factory.mktemp("run")
    cases.write_models(folder)
    ranks.run(ranks.train_and_save, ranks.Layout(2, 1), folder)
    path = write_recipe(folder)
    recipe = yaml.safe_load(path.read_text())
    recipe["policy"] = {
        "model_name": str(folder / FAMILY),
        "precision": cases.EXPORTED[FAMILY],
        "max_total_sequence_length": 64,
        "train_global_batch_size": 4,
        "tokenizer": {"name": str(ROOT / "recipes/tiny"), "chat_template": "{{ messages }}"},
    }
    path.write_text(yaml.safe_dump(recipe))
    run = folder / "run"
    run.mkdir()
    loaded = config.load(str(path))
    config.write(loaded, run / "recipe.yaml")
    checkpoints = Checkpoints(run, "attempt", loaded.checkpointing)
    for step in (3, 20):
        partial = checkpoints.begin(step)
        shutil.copytree(folder / "exported" / FAMILY / "checkpoint", partial, dirs_exist_ok=True)
        checkpoints.commit(partial, step, None, {})
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished / "run", tmp_path / "run")


def test_the_script_writes_what_transformers_loads(finished, run, tmp_path):
    command = [sys.executable, str(ROOT / "launch/export.py"), "run=run"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"written: {run / 'hf_step_20'}\n"
    assert not list(run.glob(".*partial"))
    model = AutoModelForCausalLM.from_pretrained(run / "hf_step_20")
    assert model.dtype == torch.float32
    tensors = load_file(run / "hf_step_20" / "model.safetensors")
    expected = load_file(finished / "exported" / FAMILY / "weights.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(run / "hf_step_20").chat_template == "{{ messages }}"
    assert "step 20" in (run / "hf_step_20" / "README.md").read_text()
    assert json.loads((run / "hf_step_20" / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]


def test_another_step_and_another_folder(run, tmp_path, capsys):
    assert export.main([f"run={run}", "step=3", f"out={tmp_path / 'there'}"]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'there'}\n"
    assert (tmp_path / "there" / "model.safetensors").exists()


def test_a_reward_model_is_exported_as_a_classifier(finished, run, capsys):
    one = ranks.Layout(1, 1)
    ranks.run(model_roles.save_values, one, finished)
    saved = finished / "values" / one.name
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"algorithm": "rm"}))
    checkpoints = Checkpoints(run, "attempt", config.read(run / "recipe.yaml").checkpointing)
    partial = checkpoints.begin(30)
    shutil.copytree(saved, partial, dirs_exist_ok=True)
    checkpoints.commit(partial, 30, None, {})
    assert export.main([f"run={run}"]) == 0, capsys.readouterr().err
    folder = run / "hf_step_30"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3MoeForSequenceClassification"]
    values = load_file(saved / "values.safetensors")["values"]
    last = torch.tensor(cases.LENGTHS).cumsum(0) - 1
    assert (cases.eager_scores(folder) - values[last]).abs().max() < 1e-5
    # The policy of before is no reward model.
    assert export.main([f"run={run}", "step=20"]) == 2
    assert "2 tensors differ, first ['lm_head.weight', 'score.weight'] [contradiction]" in capsys.readouterr().err


def test_wrong_requests_are_refused(run, tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert export.main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "nowhere is not a run folder: there is no such folder" in refused(f"run={tmp_path / 'nowhere'}")
    assert f"{tmp_path} is not a run folder: it has no recipe.yaml" in refused(str(tmp_path))
    assert "step: got 7; expected the step of a complete checkpoint: 3, 20 [no-checkpoint]" in refused(f"run={run}", "step=7")
    assert "[already-exists]" in refused(f"run={run}", f"out={tmp_path}")
    (run / "checkpoints/step_000020/train-rank00001.safetensors").unlink()
    damaged = refused(f"run={run}", "step=20")
    assert (
        "is not complete: train-rank00001.safetensors: got no such file" in damaged and "another step: 3 [damaged]" in damaged
    )
    assert not (run / "hf_step_20").exists()
    shutil.rmtree(run / "checkpoints")
    assert "has no complete checkpoint [no-checkpoint]" in refused(f"run={run}")


def test_a_missing_model_is_named(run, tmp_path, capsys):
    text = (run / "recipe.yaml").read_text()
    recipe = yaml.safe_load(text)
    recipe["policy"]["model_name"] = "gone/model"
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert export.main([f"run={run}"]) == 2
    assert "[unavailable-model]" in capsys.readouterr().err
