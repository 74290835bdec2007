"""Plans calibrated by a run folder. The folders are written by the run's own writer of metrics."""

import dataclasses
import json
from pathlib import Path

import pytest

from launch.plan import backend_choice, plan_table
from launch.plan.calibration import read_run
from launch.plan.estimate import plan
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import LoggerConfig
from pipeline.observe.metrics import Metrics
from tests.problems import refused

GPUS = ("cluster.train.gpus_per_node=2", "cluster.generate.gpus_per_node=2", "policy.model_name=recipes/tiny")
CLOCKS = {"rollout": 3.0, "train": 2.0, "refit": 0.5}


def choose(name: str, run_dir: Path, *overrides: str):
    return backend_choice.choose(config.load(name, [f"run_dir={run_dir}", *overrides]))


def run(folder: Path, *overrides: str, name: str = "tiny_grpo", steps: int = 4, clocks=CLOCKS, **values: float) -> Path:
    """Write a finished run's folder: `clocks` in every step but the first, which took ten times as long."""
    folder.mkdir(parents=True)
    recipe, _ = choose(name, folder, *overrides)
    config.write(recipe, folder / "recipe.yaml")
    metrics = Metrics(folder, LoggerConfig(tensorboard_enabled=False), after_step=None)
    metrics.log(0, {"val/reward": 0.1, "time/validation": 1.0})
    for step in range(1, steps + 1):
        taken = {name: seconds * (10 if step == 1 else 1) for name, seconds in clocks.items()}
        times = {f"time/{name}": seconds for name, seconds in (taken | {"step": sum(taken.values())}).items()}
        metrics.log(step, times | {"train/completion_tokens": 10.0 + step} | values)
    metrics.close()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "time/st')  # what a kill cuts short
    return folder


def test_a_plan_calibrated_by_a_run_of_the_same_recipe_equals_the_measured_times(tmp_path):
    folder = run(tmp_path / "run", *GPUS)
    found = plan(*choose("tiny_grpo", folder, *GPUS))
    assert found.measured.steps == 3
    assert found.seconds == pytest.approx(CLOCKS)
    assert found.step == pytest.approx(5.5)
    assert found.lengths.answer == 13  # the mean of 12, 13, 14
    assert "measured / predicted" in plan_table.text(found) and f"{folder} (3 steps)" in plan_table.text(found)


def test_another_recipe_is_corrected_by_the_same_ratio(tmp_path):
    """With twice the batch, each clock is its own prediction times the earlier run's ratio."""
    folder = run(tmp_path / "run", *GPUS)
    double = (*GPUS, "grpo.num_prompts_per_step=32", "plan.answer_tokens=13")
    alone = plan(*choose("tiny_grpo", tmp_path / "other", *double))
    found = plan(*choose("tiny_grpo", tmp_path / "other", *double), before=folder)
    assert alone.measured is None and not alone.ratios
    same = plan(*choose("tiny_grpo", tmp_path / "third", *GPUS, "plan.answer_tokens=13"))
    for clock, seconds in CLOCKS.items():
        assert found.ratios[clock] == pytest.approx(seconds / same.seconds[clock])
        assert found.seconds[clock] == pytest.approx(alone.seconds[clock] * found.ratios[clock])
    assert found.seconds["train"] > CLOCKS["train"]


def test_sequences_of_an_offline_run_are_its_tokens_in_however_unequal_steps(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    recipe, _ = choose("tiny_sft", folder)
    config.write(recipe, folder / "recipe.yaml")
    metrics = Metrics(folder, LoggerConfig(tensorboard_enabled=False), after_step=None)
    for step, seconds in enumerate((9.0, 0.1, 4.0, 0.2), 1):
        metrics.log(step, {"time/step": seconds, "throughput/tokens_per_s": 20 * 64 / seconds})
    metrics.close()
    found = read_run(folder)
    assert found and found.answer == pytest.approx(20)


def test_prompts_are_a_steps_tokens_without_answers(tmp_path):
    """Check sequences of 20 tokens, of which 13 are answers, in 5.5 seconds."""
    count = build(choose("tiny_grpo", tmp_path / "run", *GPUS)[0]).samples_per_step
    folder = run(tmp_path / "run", *GPUS, **{"throughput/tokens_per_s": count * 20 / 5.5})
    assert plan(*choose("tiny_grpo", folder, *GPUS)).lengths.prompt == pytest.approx(7)


def test_an_offline_run_gives_sequence_lengths(tmp_path):
    """Check 192 sequences of 5 tokens in 2 seconds."""
    gpus = GPUS[::2]
    folder = run(tmp_path / "run", *gpus, name="tiny_sft", clocks={"train": 2.0}, **{"throughput/tokens_per_s": 480.0})
    recipe, choice = choose("tiny_sft", folder, *gpus, "policy.train_global_batch_size=192")
    config.write(recipe, folder / "recipe.yaml")
    found = plan(recipe, choice)
    assert found.lengths.sequence == pytest.approx(5) and found.seconds == pytest.approx({"train": 2.0})


def test_a_run_without_gpus_gives_lengths_only(tmp_path):
    folder = run(tmp_path / "run", GPUS[-1])
    found = plan(*choose("tiny_grpo", tmp_path / "other", *GPUS), before=folder)
    assert found.ratios == {} and found.lengths.answer == 13
    assert "only lengths" in plan_table.text(found)


def test_a_run_without_measurements_is_refused(tmp_path):
    recipe, choice = choose("tiny_grpo", tmp_path / "new", *GPUS)
    assert plan(recipe, choice).measured is None  # its own run_dir is not there
    with refused(("plan_from", "no-records")):
        plan(recipe, choice, before=tmp_path / "nothing")
    first = run(tmp_path / "first", *GPUS, steps=1)
    assert read_run(first).steps == 1 and dataclasses.asdict(read_run(first))["step"] == 55


def test_a_run_whose_algorithm_samples_calibrates_no_offline_algorithm(tmp_path):
    """Nor the reverse: the lengths of the one are of answers, of the other of whole sequences."""
    folders = {
        "tiny_grpo": run(tmp_path / "grpo", *GPUS),
        "tiny_sft": run(tmp_path / "sft", *GPUS[::2], name="tiny_sft", clocks={"train": 2.0}),
    }
    for name, before in (("tiny_sft", folders["tiny_grpo"]), ("tiny_grpo", folders["tiny_sft"])):
        with refused(("plan_from", "contradiction")):
            plan(*choose(name, tmp_path / "new", *(GPUS if name == "tiny_grpo" else GPUS[::2])), before=before)


def test_what_the_run_has_otherwise_is_named(tmp_path):
    folder = run(tmp_path / "run", *GPUS)
    assert plan(*choose("tiny_grpo", folder, *GPUS)).differences == []
    renamed = plan(*choose("tiny_grpo", tmp_path / "new", *GPUS, "grpo.num_prompts_per_step=32"), before=folder)
    assert renamed.differences == [] and "has another" not in plan_table.text(renamed)
    (tmp_path / "wide").mkdir()
    wider = json.loads(Path("recipes/tiny/config.json").read_text()) | {"intermediate_size": 1024}
    (tmp_path / "wide/config.json").write_text(json.dumps(wider))
    changed = ("cluster.train.gpu=h200", "cluster.train.nodes=2", f"policy.model_name={tmp_path / 'wide'}")
    other = plan(*choose("tiny_grpo", tmp_path / "new", *GPUS, *changed), before=folder)
    model = f"model ({Path('recipes/tiny').absolute()})"
    assert other.differences == [model, "GPU (h100)", "layout"]
    told = " ".join(plan_table.text(other).split())
    assert f"that run has another {model}, another GPU (h100), another layout; costs" in told
