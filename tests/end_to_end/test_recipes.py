"""Every tiny recipe as a whole run of two steps, from an untrained model. That each learns, `python -m tests.curves` shows.

An environment that rewards digits stands in for the recipes' own, in which an untrained model earns nothing.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline import config
from tests.end_to_end.runs import LOCAL, ROOT, Fault, submit

ONLINE = [
    "needs=[]",
    "policy.generation.backend=transformers",
    "policy.generation.max_new_tokens=10",
    "env.digits.kind=tests.end_to_end.environment.Digits",
]
QUICK = ["tiny_dpo"]  # without rollouts, of which all other tests of whole runs have some
FULL = ["tiny_dapo", "tiny_distillation", "tiny_teachers"]  # the others have a test of their own, or differ in the loss alone
NAMES = sorted(path.stem for path in config.RECIPES.glob("tiny_*.yaml"))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Untrained models in folders: policy/, teachers short/ and long/, and judge/, which gives one number to a sequence."""
    from transformers import AutoConfig, LlamaForCausalLM, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(AutoConfig.from_pretrained(ROOT / "recipes/tiny")).save_pretrained(folder / "policy")
    LlamaForSequenceClassification(AutoConfig.from_pretrained(ROOT / "recipes/tiny", num_labels=1)).save_pretrained(
        folder / "judge"
    )
    for seed, name in enumerate(("short", "long")):  # teachers, of which the first is the policy
        torch.manual_seed(seed)
        LlamaForCausalLM(AutoConfig.from_pretrained(ROOT / "recipes/tiny")).save_pretrained(folder / name)
    for path in folder.iterdir():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "recipes/tiny" / name, path / name)
    return folder


def arguments(name: str, models: Path, steps: int) -> list[str]:
    recipe = config.load(name)
    key = recipe.algorithm
    found = [
        f"recipe={name}",
        *LOCAL,
        f"{key}.max_num_steps={steps}",
        f"{key}.val_period=0",
        f"{key}.val_at_start=false",
        f"{key}.val_at_end=true",
        f"{key}.max_val_samples=8",
        f"policy.model_name={models / 'policy'}",
        "policy.random_init=false",
        "policy.scheduler=null",
        "needs=[]",
    ]
    if config.generates(recipe):
        learned = config.reward_model(recipe) is not None
        validated = [f"data.validations.{name}" for name in recipe.data.validations] or ["data.validation"]
        found += [*ONLINE, *(f"{name}.env_name=digits" for name in validated)]
        teachers = recipe.on_policy_distillation.teachers
        found += [f"on_policy_distillation.teachers.{name}.model_name={models / name}" for name in teachers]
        if not teachers:  # whose environments keep their names; nothing learns from the rewards
            found += [f"env.reward.model_name={models / 'judge'}" if learned else "data.train.env_name=digits"]
    if key == "ppo":
        found += ["ppo.policy_training_start_step=1"]
    if key == "distillation":
        found += [f"teacher.model_name={models / 'policy'}"]
    return found


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.full if name in FULL else pytest.mark.long]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_runs(name, models, tmp_path):
    run = submit(tmp_path / "run", *arguments(name, models, steps=2))
    assert run.status == 0, run.output
    first, last = run.metrics()
    assert [first["step"], last["step"]] == [1, 2]
    losses = [line[key] for line in (first, last) for key in ("train/loss", "critic/loss", "val/loss") if key in line]
    assert losses and all(map(math.isfinite, losses))
    recipe = config.load(name)
    if recipe.algorithm == "dpo":
        assert first["train/preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    if recipe.algorithm == "ppo":
        assert "train/loss" not in first and "train/loss" in last  # the critic learns alone at first
    if recipe.algorithm == "distillation":  # the teacher is the student as it was
        assert abs(first["train/loss"]) < 1e-6 and abs(last["train/loss"]) < 1e-4  # it stays there
    if name == "tiny_teachers":  # as above; the other teacher is another model
        assert abs(first["train/teacher_kl/short"]) < 1e-4 < 1e-2 < first["train/teacher_kl/long"]
    if recipe.algorithm == "grpo" and recipe.policy.train_global_batch_size == 128 and name != "tiny_teachers":
        # One update a step: pi is pi_old, and is not computed apart.
        assert first["train/ppo_kl"] == last["train/ppo_kl"] == 0
    if recipe.algorithm == "grpo" and not recipe.loss_fn.disable_ppo_ratio and recipe.policy.train_global_batch_size == 128:
        assert first["train/ratio_max"] == first["train/ratio_min"] == 1


@pytest.mark.long
def test_a_killed_ppo_run_resumes_bit_for_bit(models, tmp_path):
    """The critic and its optimizer are part of a checkpoint."""
    same = [*arguments("tiny_ppo", models, steps=4), "checkpointing.save_period=1", "ppo.num_prompts_per_step=16"]
    same += ["policy.train_global_batch_size=8", "cluster.requeue.max_restarts=0"]
    whole = submit(tmp_path / "whole", *same)
    assert whole.status == 0, whole.output
    broken = submit(tmp_path / "run", *same, fault=Fault("step of the critic", victim=1, actor=0, count=9))
    assert broken.status == 1, broken.output
    assert [line["step"] for line in broken.metrics()] == [1, 2]
    rerun = submit(tmp_path / "run", *same)
    assert rerun.status == 0, rerun.output
    assert rerun.metrics() == whole.metrics()


@pytest.mark.full
def test_ppo_at_age_0_is_synchronous_to_the_last_bit_and_runs_ahead(models, tmp_path):
    """Of a run ahead, the first step has the same samples; the steps after it have older ones."""
    same = [*arguments("tiny_ppo", models, steps=3), "ppo.num_prompts_per_step=16", "policy.train_global_batch_size=8"]
    same += ["ppo.policy_training_start_step=1", "loss_fn.use_importance_sampling_correction=true"]
    on, age = "ppo.async_ppo.enabled=true", "ppo.async_ppo.max_trajectory_age_steps"
    synchronous = submit(tmp_path / "sync", *same)
    assert synchronous.status == 0, synchronous.output
    at_0 = submit(tmp_path / "age_0", *same, on, f"{age}=0")
    ahead = submit(tmp_path / "age_1", *same, on, f"{age}=1", "ppo.async_ppo.in_flight_weight_updates=true")
    assert (at_0.status, ahead.status) == (0, 0), at_0.output + ahead.output

    def plain(run):
        return [{key: value for key, value in line.items() if not key.startswith("async/")} for line in run.metrics()]

    assert len(plain(synchronous)) == 3 and plain(at_0) == plain(synchronous)
    oldest = [line["async/age_max"] for line in ahead.metrics()]
    assert oldest == [0, 1, 1]
    first, *later = zip(plain(ahead), plain(synchronous), strict=True)
    assert first[0]["critic/loss"] == first[1]["critic/loss"]
    assert all(one["train/loss"] != other["train/loss"] for one, other in later[1:])


@pytest.mark.full
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_rate_of_0_leaves_weights_as_they_were(backend, models, tmp_path):
    same = ["policy.optimizer.kwargs.lr=0", "checkpointing.save_consolidated=true", f"policy.{backend}_cfg.enabled=true"]
    run = submit(tmp_path / "run", *arguments("tiny_sft", models, steps=2), *same)
    assert run.status == 0, run.output
    before, after = (load_file(folder / "model.safetensors") for folder in (models / "policy", tmp_path / "run/hf"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
