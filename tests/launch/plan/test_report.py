"""The whole plan and its table."""

import re

import pytest

from launch.plan import backend_choice
from launch.plan.estimate import plan
from launch.terminal.units import seconds
from pipeline import config
from pipeline.config import hardware
from pipeline.config.hardware import HARDWARE
from tests.launch.plan.plans import planned, table
from tests.problems import named, refused

FULL = "policy.dtensor_cfg.recompute_granularity=full"
LAYERS = ("policy.dtensor_cfg.activation_checkpointing=true", FULL, "policy.sequence_packing.train_mb_tokens=8192")


TABLES = {  # (recipe, overrides): (what its table has, what it has not)
    ("llama8b_grpo",): (
        [
            *("All figures are estimates", "8,030,261,248 parameters", "matrix products reach 40%", "refit", "calibrated"),
            *("rollout ", "train ", "run ", "time limit ", "checkpoints ", "assumed ", "verdict "),
        ],
        [],
    ),
    ("llama8b_grpo", "plan.prompt_tokens=250", "plan.answer_tokens=900"): (["answers of 900 tokens: plan.answer_tokens"], []),
    ("llama8b_grpo", "grpo.max_num_steps=3"): (["240: enough"], ["takes 1 submission"]),
    ("llama8b_grpo", "grpo.async_grpo.in_flight_weight_updates=false"): (
        ["rollout and training overlap"],
        ["rollouts in flight"],
    ),
    ("llama8b_grpo_sync",): (["fits, by these estimates"], ["overlap"]),
    ("llama8b_sft",): (["verdict fits"], ["generate", "refit"]),
    ("llama8b_rm", "rm.max_num_steps=1000000", "rm.max_num_epochs=2"): (  # as NeMo-RL's rm.yaml has it: -1 is 1,000,000 here
        ["a step", "a validation on", "the run ends after 2 epochs of its data; set rm.max_num_steps to see the total"],
        ["GPU-hours", "submissions", "000,000", "None"],
    ),
    ("llama8b_rm", "rm.max_val_samples=1000000", "rm.max_num_steps=300"): (["set rm.max_val_samples to see how long"], []),
    ("llama8b_rm", "rm.max_val_samples=1000000", "rm.max_num_steps=300", "rm.val_period=0", "rm.val_at_end=false"): (
        ["GPU-hours"],
        ["validation uses"],
    ),
    ("llama8b_ppo",): (["updates of the critic", "values of the critic"], []),
    ("tiny_grpo", "policy.model_name=recipes/tiny"): (
        ["unknown: no GPUs in cluster.train and cluster.generate", "754,816 parameters", "a generate rank receives"],
        ["GPU-hours"],
    ),
    ("llama8b_grpo", "policy.generation.vllm_cfg.gpu_memory_utilization=0.2"): (
        ["unknown: an engine has no room for a KV cache", "KV cache may hold", "does not fit", "gpu_memory_utilization="],
        [],
    ),
}


@pytest.mark.parametrize("recipe", TABLES, ids=" ".join)
def test_the_table(recipe):
    told, (there, absent) = table(planned(*recipe)), TABLES[recipe]
    assert there or absent
    assert [part for part in there if part not in told] == []
    assert [part for part in absent if part in told] == []


def test_the_time_of_a_run_is_printed():
    found = planned("llama8b_grpo", "plan.prompt_tokens=250", "plan.answer_tokens=900")
    assert found.gpu_hours == pytest.approx(16 * found.total / 3600)
    assert found.total == pytest.approx(500 * found.step + 51 * found.validation + found.seconds["refit"])
    assert found.submissions == -(-found.total // (240 * 60)) and f"takes {found.submissions} submissions" in table(found)


def test_the_time_limit_holds_steps_with_their_validations():
    for keys in ((), ("grpo.val_period=1",), ("grpo.val_at_start=false", "grpo.val_period=0", "cluster.time_min=1000")):
        found = planned("llama8b_grpo", *keys)
        holds, limit = found.steps_in_limit, 60 * found.recipe.cluster.time_min
        assert found.duration(holds) <= limit < found.duration(holds + 1) or holds == 500
        assert f"holds about {holds} steps" in table(found) or found.submissions == 1
    assert planned("llama8b_grpo", "grpo.val_period=1").steps_in_limit < 0.8 * planned("llama8b_grpo").steps_in_limit
    assert planned("llama8b_grpo", "grpo.val_period=1").duration(1) == pytest.approx(
        planned("llama8b_grpo").step + 2 * planned("llama8b_grpo").validation + planned("llama8b_grpo").seconds["refit"]
    )


def test_a_proposed_time_limit_leaves_a_margin():
    found = planned("llama8b_grpo")
    (proposed,) = re.findall(r"one with cluster.time_min=(\d+), with 10% and 15 minutes for what is not counted", table(found))
    assert 0 <= int(proposed) - (1.1 * found.total / 60 + 15) < 10
    assert "Published steps took up to 1.87 times as long as planned" in table(found)
    barely = table(planned("llama8b_grpo", f"cluster.time_min={int(found.total / 60) + 1}"))
    assert re.search(rf"barely enough; [01] min are left for what is not counted. Try cluster.time_min={proposed}", barely)
    assert "enough; " in (roomy := table(planned("llama8b_grpo", f"cluster.time_min={proposed}"))) and "barely" not in roomy
    none = planned("llama8b_grpo", "cluster.time_min=1")
    assert none.submissions is None and f"holds no step. Try cluster.time_min={proposed}" in table(none)


def test_published_steps_are_of_the_gpus_that_ran_them():
    """None ran on the h200 and the b200, whose files have the ranges of others."""
    for gpu, source in (("h200", "h100"), ("b200", "gb200")):
        text = table(planned("llama8b_grpo", f"cluster.train.gpu={gpu}", f"cluster.generate.gpu={gpu}"))
        assert f"Published steps of GRPO on {source} took" in text and f"; on {gpu} none are known" in text
        assumed, theirs = hardware.gpu(gpu).assumed, hardware.gpu(source).assumed
        assert (assumed.shortest_step, assumed.longest_step) == (theirs.shortest_step, theirs.longest_step)
    assert "none are known" not in table(planned("llama8b_grpo"))


def test_a_step_has_the_range_of_published_steps(tmp_path):
    """With the factors of recipes/hardware, and without a range for a GPU of which no published step is known."""
    for gpu in ("h100", "gb200"):
        found = planned("llama8b_grpo_sync", f"cluster.train.gpu={gpu}", f"cluster.generate.gpu={gpu}")
        assumed = hardware.gpu(gpu).assumed
        ends = f"{seconds(assumed.shortest_step * found.step)} to {seconds(assumed.longest_step * found.step)} a step"
        assert f"expect {ends}" in table(found)
    text = (HARDWARE / "h100.yaml").read_text()
    (tmp_path / "new.yaml").write_text("".join(line for line in text.splitlines(True) if "est_step" not in line))
    other = planned("llama8b_grpo_sync", *(f"cluster.{name}.gpu={tmp_path}/new.yaml" for name in ("train", "generate")))
    assert "no published steps on new are known" in table(other)
    for one, two in (("h100", f"{tmp_path}/new.yaml"), (f"{tmp_path}/new.yaml", "h100")):
        both = planned("llama8b_grpo_sync", f"cluster.train.gpu={one}", f"cluster.generate.gpu={two}")
        assert "no published steps on new are known" in table(both)


def test_float16_is_priced_as_bfloat16():
    half, other = planned("llama8b_grpo", "policy.precision=float16"), planned("llama8b_grpo")
    assert half.step == other.step and half.train.total == other.train.total and half.generate.total == other.generate.total


def test_sampling_ahead_of_training_hides_the_shorter_of_the_two():
    drained = "grpo.async_grpo.in_flight_weight_updates=false"
    turns = planned("llama8b_grpo_sync", *LAYERS)
    hidden, ahead = planned("llama8b_grpo", drained, *LAYERS), planned("llama8b_grpo", *LAYERS)
    assert turns.seconds == hidden.seconds == ahead.seconds and min(turns.seconds.values()) > 0
    assert turns.step - hidden.step == pytest.approx(min(turns.seconds["rollout"], turns.seconds["train"]))
    assert ahead.step == pytest.approx(ahead.seconds["train"] + ahead.seconds["refit"])  # which takes longer than sampling
    assert "rollout and training overlap, 2 rollouts in flight" in table(ahead)
    assert "waits train ranks 0% of a step, engines 25%;" in table(ahead)


def test_an_engine_in_eight_bits_is_not_refused_for_its_size_in_sixteen():
    vllm = "policy.generation.vllm_cfg"
    small, fp8 = "cluster.generate.gpu_memory_gb=12", f"{vllm}.precision=fp8"
    assert named(planned("llama8b_grpo", small).problems()) == {(f"{vllm}.tensor_parallel_size", "out-of-memory")}
    assert not list(planned("llama8b_grpo", small, fp8).problems())
    some = planned("llama8b_grpo", small, fp8, f"{vllm}.quantization_ignored_layer_kws=[layers.0.]")
    assert not list(some.problems()) and not some.fits and list(some.warnings())


def test_an_offline_algorithm_has_no_generate_part():
    found = planned("llama8b_sft")
    assert (found.generate, found.refit, list(found.seconds), found.gpus) == (None, None, ["train"], 8)
    assert found.validations > 0 and found.validation > 0  # on what data.train.split_validation_size holds out


def test_a_validation_on_all_data_has_no_time():
    found = planned("llama8b_rm", "rm.max_val_samples=1000000", "rm.max_num_steps=300")
    assert found.validation is None and found.validations > 0
    assert found.total == pytest.approx(found.steps * found.step)


def test_a_validation_on_pairs_is_two_passes_over_two_sequences_each():
    held_out = ("data.train.split_validation_size=0.1", "dpo.val_period=10")
    found = planned("llama8b_dpo", *held_out, "dpo.max_val_samples=${policy.train_global_batch_size}")
    (reference,) = [phase for phase in found.phases if "reference" in phase.name]  # over as many pairs
    assert found.validation == pytest.approx(2 * (reference.seconds - reference.parts["host copies"]))


def test_an_exact_overflow_is_a_problem_with_a_key():
    huge = planned(
        "llama70b_grpo", "policy.megatron_cfg.tensor_model_parallel_size=1", "policy.megatron_cfg.sequence_parallel=false"
    )
    assert named(huge.problems()) == {("policy.megatron_cfg.pipeline_model_parallel_size", "out-of-memory")} and not huge.fits
    (problem,) = planned("llama70b_grpo", "policy.generation.vllm_cfg.tensor_parallel_size=1").problems()
    assert named([problem]) == {("policy.generation.vllm_cfg.tensor_parallel_size", "out-of-memory")}
    assert problem.message.startswith("got 1, ") and problem.message.endswith("Try 4")
    assert "does not fit" in table(huge)


def test_an_estimated_overflow_is_a_warning():
    tight = planned("llama8b_grpo", "cluster.train.gpu_memory_gb=25")
    assert not list(tight.problems()) and not tight.fits
    (warning,) = tight.warnings()
    told = table(tight)
    assert "a train rank may need" in warning and warning in told
    assert "would help policy." in told and tight.advice()[0] in told
    assert planned("llama8b_grpo").advice() == []


def test_the_model_of_a_run_that_has_not_started_is_planned(tmp_path, monkeypatch):
    """tiny_sft has not run: the model that it will save is as large as its initial model."""
    (tmp_path / "recipes").symlink_to(config.RECIPES)
    monkeypatch.chdir(tmp_path)
    pending = [tmp_path / "runs/tiny_sft"]
    recipe, choice = backend_choice.choose(config.load("tiny_grpo"), pending)
    assert plan(recipe, choice, pending=pending).shapes["policy"].parameters == 754_816
    other = config.load("tiny_grpo", ["policy.model_name=runs/base/hf"])
    with refused(("policy.model_name", "unavailable-model")):
        plan(other, choice, pending=[tmp_path / "runs/base"])


def test_the_ranks_of_a_reward_model_are_listed():
    judge = "env.preference.model_name=meta-llama/Llama-3.1-8B-Instruct"
    found = planned("llama8b_grpo_rm", judge)
    told = table(found, compared=True)
    assert "memory of the fullest rank train generate reward" in told
    weights = found.reward.parts["weights"]
    assert found.reward.total > weights == pytest.approx(2 * found.shapes["policy"].parameters / 2, rel=0.1)
    assert "async, as it is 1 + 1 + 1 18" in told
    small = planned("llama8b_grpo_rm", judge, "cluster.reward.gpu_memory_gb=10")
    assert found.fits and not small.fits
    assert "a reward rank may need 14 GB, and its GPU has 10 GB" in table(small)
    assert planned("llama8b_grpo_rm", judge, "env.preference.served_by=train").reward is None
