"""Several teachers: which one scores a sample, the advantages and divergences of each, and refused recipes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pipeline import config
from pipeline.algorithms import build
from pipeline.algorithms.teacher_assignment import loaded_teachers, teacher_by_environment
from pipeline.config import Recipe, RecipeError
from pipeline.config.loading import complete
from pipeline.data.batches import split_batch
from pipeline.data.packing import pack
from pipeline.train.outputs import _numbers
from pipeline.types import DataParallelRank, GlobalCounts, Outputs, Sample
from tests.algorithms.groups import group_of
from tests.problems import named

SECTION = "on_policy_distillation"
SETS = ("math", "code", "chat")


def recipe(teachers: dict[str, Any], default: str | None = None, **sections: Any) -> Recipe:
    """Return a recipe of three data sets, each with an environment of its name. teachers: model names, or keys, by name."""
    keys = {name: value if isinstance(value, dict) else {"model_name": value} for name, value in teachers.items()}
    values = {
        "name": "several",
        "run_dir": "runs/several",
        "algorithm": "grpo",
        "grpo": {"adv_estimator": {"name": "opd"}, "num_prompts_per_step": 32, "num_generations_per_prompt": 1},
        "distillation": {"num_prompts_per_step": 32},
        "policy": {"model_name": "student", "train_global_batch_size": 32},
        SECTION: {"teachers": keys, "default_teacher_alias": default},
        "data": {"train": None, "datasets": {name: {"data_path": "any.jsonl", "env_name": name} for name in SETS}},
        "env": {name: {"kind": "exact_match"} for name in SETS},
    }
    return complete(values | sections)


def problems(**more: Any) -> set[tuple[str, str]]:
    try:
        recipe(**more)
    except RecipeError as error:
        return named(error.problems)
    return set()


def test_the_teacher_of_each_environment() -> None:
    given = recipe({"math": "a", "code": "b"}, default="math")
    assert teacher_by_environment(given) == {"math": "math", "code": "code", "chat": "math"}
    assert loaded_teachers(given) == ("math", "code")
    assert list(config.models(given)) == ["policy", f"{SECTION}.teachers.math", f"{SECTION}.teachers.code"]


def test_equal_teachers_are_loaded_once() -> None:
    given = recipe({"math": "a", "code": "a", "chat": {"model_name": "a", "precision": "float32"}})
    assert teacher_by_environment(given) == {"math": "math", "code": "math", "chat": "chat"}
    assert loaded_teachers(given) == ("math", "chat")


@pytest.mark.parametrize("algorithm", ["grpo", "distillation"])
def test_samples_carry_the_name_of_their_teacher(algorithm: str) -> None:
    given = recipe({"math": "a", "code": "b"}, default="math", algorithm=algorithm)
    groups = [group_of([1.0, 0.0]), group_of([0.0])]
    groups = [
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, environment=name))
        for group, name in zip(groups, ("code", "chat"), strict=True)
    ]
    learned: Any = build(given)
    samples = learned.compute_advantages(groups)
    assert [sample.teacher for sample in samples] == ["code", "code", "math"]
    assert all((sample.advantages == 0).all() and sample.loss_mask.any() for sample in samples)


def sample(tokens: int, teacher: str) -> Sample:
    ones = torch.ones(tokens).numpy()
    return Sample(ones.astype("int32"), ones.astype(bool) & (torch.arange(tokens).numpy() > 0), -ones, 0 * ones, 0.0, teacher)


def test_every_teacher_scores_its_own_samples_once_in_equally_many_microbatches() -> None:
    names = ["math", "code", "math", "math", "code", "math", "math", "math"]
    samples = [sample(3 + i, name) for i, name in enumerate(names)]
    policy = dataclasses.replace(recipe({"math": "a"}, default="math").policy, logprob_batch_size=2, train_micro_batch_size=1)
    policy = dataclasses.replace(policy, sequence_packing=dataclasses.replace(policy.sequence_packing, enabled=False))
    places = [DataParallelRank(rank, 3) for rank in range(3)]
    by_rank = [updates[0] for updates in split_batch(samples, policy, places, len(samples))]
    scored = []
    for teacher in ("math", "code"):
        assert len({len(update.taught[teacher]) for update in by_rank}) == 1
        for update in by_rank:
            of_teacher = [update.samples[i] for microbatch in update.taught[teacher] for i in microbatch]
            assert {one.teacher for one in of_teacher} <= {teacher}
            scored += [len(one.tokens) for one in of_teacher]
    assert sorted(scored) == sorted(len(one.tokens) for one in samples)


def test_advantages_and_metrics_by_hand() -> None:
    """Two samples of one teacher, one of another, and the gradient of REINFORCE: - A / tokens."""
    given = recipe({"math": "a", "code": "b"}, default="math", loss_fn={"disable_ppo_ratio": True})
    algorithm: Any = build(given)
    batch = pack([sample(3, "math"), sample(2, "code"), sample(2, "math")], "cpu")
    old = torch.tensor([0.0, -1, -2, 0, -1, 0, -3])
    teacher = torch.tensor([9.0, -0.5, -3, 9, -5, 9, -1])
    batch = algorithm.estimate(dataclasses.replace(batch, old_logprobs=old, teacher_logprobs=teacher))
    assert batch.advantages.tolist() == [0, 0.5, -1, 0, -4, 0, 2]
    logprobs = old.clone().requires_grad_()
    found = algorithm.loss(Outputs(logprobs=logprobs), batch, GlobalCounts(4, 3))
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    assert gradient.tolist() == [0, -0.125, 0.25, 0, 1, 0, -0.5]
    assert found.metrics["teacher_kl"].item() == pytest.approx((-0.5 + 1 + 4 - 2) / 4)
    metrics = {key: number for name, value in found.metrics.items() for key, number in _numbers_of(name, value).items()}
    assert metrics["teacher_kl/math"] == pytest.approx((-0.5 + 1 - 2) / 3)
    assert metrics["teacher_kl/code"] == pytest.approx(4)


def _numbers_of(name: str, value: torch.Tensor) -> dict[str, float]:
    return _numbers(name, value.double().numpy()) if name.endswith("_weighted") else {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"teachers": {"math": "a"}, "default": "math"}, set()),
        ({"teachers": {"math": "a", "code": "b"}}, {(f"{SECTION}.teachers", "missing-value")}),
        ({"teachers": {"math": "a"}, "default": "maths"}, {(f"{SECTION}.default_teacher_alias", "not-a-choice")}),
        ({"teachers": {}}, {(f"{SECTION}.teachers", "missing-value")}),
        ({"teachers": {"math": {}}, "default": "math"}, {(f"{SECTION}.teachers.math.model_name", "missing-value")}),
        ({"teachers": {"math": "a", "maths": "b"}, "default": "math"}, {(f"{SECTION}.teachers.maths", "has-no-effect")}),
        (
            {"teachers": {"math": "a"}, "default": "math", "grpo": {"num_prompts_per_step": 2}},
            {(f"{SECTION}.teachers", "has-no-effect")},
        ),
        (
            {"teachers": {"math": "a"}, "default": "math", "algorithm": "distillation", "teacher": {"model_name": "c"}},
            {("teacher.model_name", "contradiction")},
        ),
        ({"teachers": {"math": "a"}, "default": "math", "algorithm": "distillation"}, set()),
    ],
)
def test_recipes_that_no_teacher_can_score_are_refused(given: dict[str, Any], expected: set[tuple[str, str]]) -> None:
    assert problems(**given) == expected


def test_truncated_sampling_is_refused() -> None:
    generation = {"top_p": 0.9, "top_k": 5}
    policy = {"model_name": "student", "train_global_batch_size": 32, "generation": generation}
    assert problems(teachers={"math": "a"}, default="math", policy=policy) == {
        ("policy.generation.top_p", "contradiction"),
        ("policy.generation.top_k", "contradiction"),
    }


def test_advantages_of_chunks_by_hand() -> None:
    """Two tokens share a chunk in the ratio 1 : 3 of their log-probs; the policy is sure of both tokens of another one."""
    given = recipe({"math": "a", "code": "b"}, default="math")
    batch = pack([sample(3, "math"), sample(3, "code"), sample(2, "math")], "cpu")
    old = torch.tensor([0.0, -1, -3, 0, 0, 0, 0, -2])
    teacher = torch.tensor([9.0, -2, -2, 9, -6, -6, 9, -5])
    batch = dataclasses.replace(batch, chunks=torch.tensor([0, 1, 1, 3, 4, 4, 6, 7]))
    algorithm: Any = build(given)
    estimated = algorithm.estimate(dataclasses.replace(batch, old_logprobs=old, teacher_logprobs=teacher))
    assert estimated.advantages.tolist() == [0, 0.5, 1.5, 0, -3, -3, 0, -3]
