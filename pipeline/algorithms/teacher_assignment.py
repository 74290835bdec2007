"""Choose which of several frozen teachers scores a sample, and check the recipe's section of these teachers.

This is NeMo-RL's multi-teacher on-policy distillation (nemo_rl/algorithms/opd.py), after https://arxiv.org/abs/2601.02780.
Exactly one teacher scores each sample. The sample's environment names the teacher; in NeMo-RL the agent of NeMo Gym does. Their
vocabularies may differ: pipeline/data/teacher_text.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipeline.recipe.problems import Problem

if TYPE_CHECKING:
    from pipeline.config import Recipe
    from pipeline.types import RolloutGroup, Sample

SECTION = "on_policy_distillation"


def training_environments(recipe: Recipe) -> dict[str, str]:
    """Return environment -> key of the first data set that has it, for the environments of the training data."""
    datasets, train = recipe.data.datasets, recipe.data.train
    single = {"data.train": train} if train else {}
    sets = {f"data.datasets.{name}": dataset for name, dataset in datasets.items()} or single
    return {dataset.env_name: key for key, dataset in reversed(list(sets.items())) if dataset.env_name is not None}


def teacher_by_environment(recipe: Recipe) -> dict[str, str]:
    """Return environment -> name of its teacher, for the environments of the training data that have a teacher.

    If several teachers have equal sections, the first of them scores the samples of all.
    """
    teachers, default = recipe.on_policy_distillation.teachers, recipe.on_policy_distillation.default_teacher_alias
    aliases = {name: name if name in teachers else default for name in training_environments(recipe)}
    return {
        name: next(first for first, keys in teachers.items() if keys == teachers[alias])
        for name, alias in aliases.items()
        if alias in teachers
    }


def loaded_teachers(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the teachers that score a sample, in the recipe's order."""
    used = set(teacher_by_environment(recipe).values())
    return tuple(name for name in recipe.on_policy_distillation.teachers if name in used)


def with_teachers(recipe: Recipe, groups: Sequence[RolloutGroup], samples: Sequence[Sample]) -> list[Sample]:
    """Return copies of the samples with the names of their teachers. samples: one per rollout of `groups`, in order."""
    teachers = teacher_by_environment(recipe)
    names = (teachers[group.prompt.environment] for group in groups for _ in group.rollouts)
    return [dataclasses.replace(sample, teacher=name) for sample, name in zip(samples, names, strict=True)]


# ---- checks ------------------------------------------------------------------------------------------------------------------


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the section on_policy_distillation, for an algorithm that reads it."""
    teachers, default = recipe.on_policy_distillation.teachers, recipe.on_policy_distillation.default_teacher_alias
    for name, keys in teachers.items():
        if keys.model_name is None:
            key = f"{SECTION}.teachers.{name}.model_name"
            yield Problem(key, "missing-value", "got null; expected a folder or a Hugging Face name")
    if default is not None and default not in teachers:
        message = f"got {default}; expected a key of {SECTION}.teachers: {', '.join(teachers) or 'there is none'}"
        yield Problem(f"{SECTION}.default_teacher_alias", "not-a-choice", message)
        return
    environments = training_environments(recipe)
    for name, key in environments.items():
        if name not in teachers and default is None:
            message = f"got no teacher for {name}, the environment of {key}. Try {SECTION}.default_teacher_alias"
            yield Problem(f"{SECTION}.teachers", "missing-value", message)
    assigned = {name if name in teachers else default for name in environments}
    for name in teachers.keys() - assigned:
        message = f"got a teacher for {name}; expected an environment of the training data: {', '.join(environments)}"
        yield Problem(f"{SECTION}.teachers.{name}", "has-no-effect", message)
