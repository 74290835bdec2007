"""Check that teachers have the policy's vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.preflight.model_tokenizers import rows
from launch.recipes.model_files import is_inside, model_folder
from pipeline import config
from pipeline.config import Problem, Recipe, collected
from pipeline.data.file_tokenizer import read_tokenizer

OWN_TOKENS = 0.01  # share of a vocabulary that only one model may have, such as markers of turns


def problems(recipe: Recipe, tokenizer: Path | None, pending: Sequence[os.PathLike]) -> Iterator[Problem]:
    """Yield problems of each teacher's vocabulary.

    tokenizer: the policy's tokenizer.json, or None. pending: models that needed recipes are still to write.
    """
    for name, model in config.teachers(recipe).items():
        if model.model_name is None:  # other checks report it
            continue
        key = f"{config.teacher_section(name)}.model_name"
        if tokenizer:
            yield from _check_tokenizer(recipe, key, model.model_name, tokenizer, pending)
        yield from _check_rows(recipe, key, model.model_name, config.teacher_policy(recipe, model), pending)


def _check_tokenizer(
    recipe: Recipe, key: str, name: str, student_file: Path, pending: Sequence[os.PathLike]
) -> Iterator[Problem]:
    """Check that the teacher has the policy's vocabulary, apart from a few added tokens."""
    if is_inside(name, pending):
        return
    problems: list[Problem] = []
    with collected(problems):
        teacher_file = model_folder(key, name) / "tokenizer.json"
        if not teacher_file.exists():
            return
        student, teacher = read_tokenizer(student_file).get_vocab(), read_tokenizer(teacher_file).get_vocab()
    if problems:  # other checks report them, such as a missing folder
        return
    moved = [token for token, number in student.items() if teacher.get(token, number) != number]
    absent = len(student.keys() - teacher.keys())
    if moved or absent > OWN_TOKENS * len(student):
        difference = f"the id of '{moved[0]}' differs" if moved else f"it lacks {absent} of the policy's {len(student)} tokens"
        policy = f"policy.tokenizer.name {recipe.policy.tokenizer.name}"
        message = (
            f"got {name}, whose vocabulary differs from {policy}: {difference}; expected a teacher with the policy's tokenizer"
        )
        yield Problem(key, "contradiction", message)


def _check_rows(
    recipe: Recipe, key: str, name: str, teacher: config.PolicyConfig, pending: Sequence[os.PathLike]
) -> Iterator[Problem]:
    """Check that the teacher has no more vocabulary rows than the policy.

    Models with the same tokenizer may differ in their unused rows, and a teacher could give probability to a row that the
    policy lacks.
    """
    student_rows, teacher_rows = rows("policy", recipe.policy, pending), rows(key.removesuffix(".model_name"), teacher, pending)
    if student_rows and teacher_rows and teacher_rows > student_rows:
        most = f"expected at most the policy's {student_rows}"
        reason = "since the teacher may give probability to rows that the policy does not have"
        yield Problem(key, "too-large", f"got {name} with {teacher_rows} rows of vocabulary; {most}, {reason}")
