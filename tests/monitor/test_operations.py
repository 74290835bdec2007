"""Operations of a step, against the plan's and by hand."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pipeline import config
from pipeline.models import flops
from pipeline.models.shape import ModelShape
from pipeline.monitor.operations import ModelWork, StepOperations
from pipeline.types import Branch, Sample
from tests.launch.made_runs import group

CONFIG = json.loads(Path("recipes/tiny/config.json").read_text())
SHAPE = ModelShape.of(CONFIG)


def recipe(*overrides):
    return config.load("tests/end_to_end/recipe.yaml", list(overrides))


def sample(length):
    zeros = np.zeros(length, np.float32)
    return Sample(np.zeros(length, np.int32), np.ones(length, bool), logprobs=zeros, advantages=zeros)


def forward(*lengths, shape=SHAPE):
    return sum(flops.forward(shape, length, length**2 / 2) for length in lengths)


def test_a_step_of_a_recipe_takes_the_passes_of_its_algorithm():
    """Log-probs of the reference are a forward pass, old ones one of all updates but the first, and an update is three."""
    operations = StepOperations.of(recipe())
    assert operations
    work = operations.train([sample(10), sample(20)], ["policy"])
    assert work.model == work.hardware == pytest.approx(4.5 * forward(10, 20))  # of two updates
    once = StepOperations.of(recipe("loss_fn.reference_policy_kl_penalty=0", "policy.train_global_batch_size=16"))
    assert once and once.train([sample(10)], ["policy"]).model == pytest.approx(3 * forward(10))


def test_each_sample_is_read_by_its_own_teacher():
    larger = ModelShape.of({**CONFIG, "num_hidden_layers": 2 * CONFIG["num_hidden_layers"]})
    samples = [dataclasses.replace(sample(length), teacher=name) for length, name in ((10, "short"), (20, "long"))]
    shapes = {"policy": SHAPE, **{f"on_policy_distillation.teachers.{name}": larger for name in ("short", "long")}}
    several = StepOperations(config.load("tiny_teachers", []), shapes)  # old log-probs, an update, and the teachers
    found = several.train(samples, ["policy"]).model
    assert found == pytest.approx(4 * forward(10, 20) + forward(10, 20, shape=larger))
    one = StepOperations(config.load("tiny_distillation", []), {"policy": SHAPE, "teacher": larger})
    assert one.train([sample(10)], ["policy"]).model == pytest.approx(3 * forward(10) + forward(10, shape=larger))


def test_what_is_recomputed_counts_for_the_hardware_alone():
    operations = StepOperations.of(recipe("policy.dtensor_cfg.activation_checkpointing=true"))
    assert operations
    work = operations.train([sample(10)], ["policy"])
    assert work.model == pytest.approx(4.5 * forward(10)) and work.hardware == pytest.approx(5.5 * forward(10))


def test_engines_read_prompts_and_draw_tokens():
    rollouts = group(0, 1, [[1, 2], [1, 2, 3]], [0.0, 1.0])
    expected = 2 * flops.forward(SHAPE, 1, 1 / 2)  # transformers has no prefix cache
    expected += sum(flops.forward(SHAPE, n, 0) + flops.attention(SHAPE, ((1 + n) ** 2 - 1) / 2) for n in (2, 3))
    operations = StepOperations.of(recipe())
    assert operations and operations.generate([rollouts]) == pytest.approx(expected)


def test_an_episode_s_other_conversations_count():
    """With a prefix cache, an engine reads of the second context what comes after the first conversation's three tokens."""
    (one,) = group(0, 1, [[1, 2, 3]], [0.0]).rollouts
    told = np.asarray([*one.conversations(group(0, 1, [[1]], [0.0]).prompt)[0].context, 1, 2, 7, 7], np.int32)
    branched = dataclasses.replace(
        group(0, 1, [[1, 2, 3]], [0.0]), rollouts=(dataclasses.replace(one, branches=(Branch(told, one.turns),)),)
    )
    cached = StepOperations(recipe("policy.generation.backend=vllm"), {"policy": SHAPE})
    drawn = [flops.forward(SHAPE, 3, 0) + flops.attention(SHAPE, ((n + 3) ** 2 - n**2) / 2) for n in (1, 5)]
    read = flops.forward(SHAPE, 1, 1 / 2) + flops.forward(SHAPE, 2, (5**2 - 3**2) / 2)
    assert cached.generate([branched]) == pytest.approx(read + sum(drawn))
    both = dataclasses.replace(sample(10), branches=(sample(20),))
    assert cached.train([both], ["policy"]) == cached.train([sample(10), sample(20)], ["policy"])


def test_utilisation_is_of_the_precision_s_peak_and_only_on_gpus():
    gpus = ("cluster.train.gpus_per_node=2", "cluster.generate.gpus_per_node=2", "policy.precision=bfloat16")
    operations = StepOperations(recipe(*gpus), {"policy": SHAPE})
    peak = config.hardware.gpu("h100").bf16_tflops * 1e12
    found = operations.metrics("train", ModelWork(peak, 1.5 * peak), seconds=2.0, ranks=2)
    assert found["resources/train_mfu"] == pytest.approx(0.25) and found["resources/train_hfu"] == pytest.approx(0.375)
    on_cpus = StepOperations(recipe(), {"policy": SHAPE}).metrics("train", ModelWork(1e12, 1e12), 2.0, 2)
    assert on_cpus == {"resources/train_tflops_per_rank": 0.25}


def test_a_model_of_unknown_shape_costs_the_utilisation_alone(caplog, monkeypatch):
    monkeypatch.setattr("pipeline.monitor.operations.model_config", lambda _: 1 / 0)
    assert StepOperations.of(recipe()) is None and "left out" in caplog.text
