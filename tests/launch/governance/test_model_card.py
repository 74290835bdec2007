"""The model card names where the weights come from and what they score, without secrets and local folders."""

import json

import pytest
import yaml

from launch.governance import model_card
from launch.runs.run_folder import RunFolder
from tests.evaluation import made
from tests.launch import made_runs


@pytest.fixture
def run(tmp_path):
    model = tmp_path / "home/somebody/runs/tiny_sft/checkpoints/step_9/hf"
    model.mkdir(parents=True)
    overrides = (f"policy.model_name={model}", "data.train.dataset_name=openai/gsm8k", "data.train.subset=main")
    run = made_runs.folder(tmp_path / "run", "tiny_grpo", *overrides)
    made.evaluation(run, 10, {"add": made.answers(solved=0.2)})
    made.evaluation(run, 20, {"add": made.answers(), "a|b": made.answers(10)})
    made.evaluation(run, 20, {"add": made.answers(50, 2)[:-1]}, suite="nightly")
    return run


def test_the_card_has_lineage_and_scores_of_its_step(run, tmp_path):
    card = model_card.text(RunFolder.at(run), 20)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "tags": ["hetstep", "grpo"],
        "datasets": ["openai/gsm8k"],
    }
    entry = json.loads((run / "manifest.json").read_text())[-1]
    for said in ("| base model | tiny\\_sft/checkpoints/step\\_9/hf |".replace("\\_", "_"), "| steps | 20 of 100 |", "grpo"):
        assert said in body, said
    assert entry["git"]["commit"] in body and f"torch {entry['versions']['torch']}" in body
    assert "| train | openai/gsm8k | main |" in body
    score = json.loads((run / "evaluations/math/step_000020/scores.json").read_text())["tasks"]["add"]["metrics"]["accuracy"]
    interval = f"{score['low']:.3f} to {score['high']:.3f}"
    assert f"| math | add | accuracy | {score['value']:.3f} | {interval} | 40 | 80 |" in body
    assert "| math | a\\|b |" in body and "- nightly: add: 1 of 100 answers are missing" in body
    assert "num_prompts_per_step" in body
    assert str(tmp_path) not in card and "somebody" not in card


def test_a_card_without_evaluations_and_with_a_secret(run, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "extremely-secret")
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("name: tiny_grpo", "name: extremely-secret"))
    card = model_card.text(RunFolder.at(run), 5)
    assert "extremely-secret" not in card and "# ***, step 5" in card and "## Scores" not in card


def test_a_model_of_the_hub_is_the_base_model(tmp_path):
    run = made_runs.folder(tmp_path / "run", "tiny_grpo", "policy.model_name=Qwen/Qwen3-0.6B")
    front = yaml.safe_load(model_card.text(RunFolder.at(run), 1).split("---\n")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B"


def test_random_weights_unread_keys_and_folders_of_warnings(tmp_path):
    overrides = ("policy.model_name=Qwen/Qwen3-0.6B", "policy.random_init=true", "needs=[]")
    run = made_runs.folder(tmp_path / "run", "tiny_sft", *overrides)
    made.evaluation(run, 10, {"add": made.answers()})
    path = run / "evaluations/math/step_000010/scores.json"
    scores = json.loads(path.read_text())
    path.write_text(json.dumps({**scores, "warnings": ["add: cut at /home/somebody/data/test.jsonl, see https://a.b/c/d"]}))
    card = model_card.text(RunFolder.at(run), 10)
    assert "| base model | random weights, of the shape of Qwen/Qwen3-0.6B |" in card and "base_model" not in card
    assert "ratio_clip" not in card and "policy.optimizer" in card and "seed: " in card
    assert "cut at test.jsonl, see https://a.b/c/d" in card and "somebody" not in card
