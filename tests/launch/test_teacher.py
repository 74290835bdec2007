"""A teacher of another vocabulary is refused before submission."""

import json

import pytest

from launch.preflight import input_files
from pipeline import config
from tests.launch.model import write_model, write_recipe
from tests.problems import named, refused


@pytest.fixture
def recipe(tmp_path):
    """Distillation from a teacher with the policy's tokenizer."""
    path = write_recipe(tmp_path, algorithm="distillation", distillation={"num_prompts_per_step": 4})
    teacher = write_model(tmp_path / "teacher")
    (teacher / "model.safetensors").touch()
    return config.load(str(path), [f"teacher.model_name={teacher}"])


def tokens(folder, change):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content["model"]["vocab"])
    path.write_text(json.dumps(content))


def test_the_policys_own_is_accepted(recipe):
    config.refuse(input_files.problems(recipe))


def test_other_numbers_for_the_same_tokens(recipe, tmp_path):
    def swap(vocabulary):
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    tokens(tmp_path / "teacher", swap)
    assert named(input_files.problems(recipe)) == {("teacher.model_name", "contradiction")}


def test_tokens_that_it_does_not_know(recipe, tmp_path):
    tokens(tmp_path / "teacher", lambda vocabulary: [vocabulary.pop(digit) for digit in "789"])
    assert named(input_files.problems(recipe)) == {("teacher.model_name", "contradiction")}


@pytest.mark.parametrize(("rows", "refused"), [(48, True), (40, False), (39, False)])
def test_rows_that_stand_for_no_token(recipe, tmp_path, rows, refused):
    """The same tokenizer, but a teacher that may ask for rows which the policy does not have."""
    path = tmp_path / "teacher/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": rows}))
    assert named(input_files.problems(recipe)) == ({("teacher.model_name", "too-large")} if refused else set())


def test_a_teacher_that_is_not_there(recipe, tmp_path):
    (tmp_path / "teacher/config.json").unlink()
    with refused(("teacher.model_name", "file-not-found")):
        config.refuse(input_files.problems(recipe))
