"""A teacher with another vocabulary: refused where distributions over tokens are compared, checked where texts are."""

import dataclasses
import json

import pytest

from launch.preflight import input_files, model_tokenizers
from pipeline import config
from tests.launch.model import write_model, write_recipe
from tests.problems import named, refused


@pytest.fixture
def recipe(tmp_path):
    """Return a recipe that distills from a teacher with the policy's tokenizer."""
    path = write_recipe(tmp_path, algorithm="distillation", distillation={"num_prompts_per_step": 4})
    teacher = write_model(tmp_path / "teacher")
    (teacher / "model.safetensors").touch()
    return config.load(str(path), [f"teacher.model_name={teacher}"])


@pytest.fixture
def several(tmp_path):
    """Return a recipe with two teachers, of whom the second has other ids for two tokens."""
    path = write_recipe(tmp_path, algorithm="distillation", distillation={"num_prompts_per_step": 4})
    for name in ("teacher", "other"):
        (write_model(tmp_path / name) / "model.safetensors").touch()
    (environment,) = config.load(str(path), [f"teacher.model_name={tmp_path / 'teacher'}"]).env
    section, second = "on_policy_distillation.teachers", {"kind": "exact_match"}
    return config.load(
        str(path),
        [
            "data.train=null",
            f"data.datasets.one={{data_path: {tmp_path / 'train.jsonl'}, env_name: {environment}}}",
            f"data.datasets.two={{data_path: {tmp_path / 'train.jsonl'}, env_name: second}}",
            f"env.second={second}",
            f"{section}.{environment}.model_name={tmp_path / 'teacher'}",
            f"{section}.second.model_name={tmp_path / 'other'}",
        ],
    )


def test_each_of_several_teachers_needs_the_policys_tokenizer(several, tmp_path):
    config.refuse(model_tokenizers.teacher_problems(several, tmp_path / "teacher/tokenizer.json", []))

    def swap(vocabulary):
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    tokens(tmp_path / "other", swap)
    found = named(model_tokenizers.teacher_problems(several, tmp_path / "teacher/tokenizer.json", []))
    assert found == {("on_policy_distillation.teachers.second.model_name", "contradiction")}


@pytest.mark.parametrize(
    ("template", "keys", "expected"),
    [
        ("{{ messages[0].content }}", {}, set()),
        (None, {}, {("data.apply_chat_template", "missing-value")}),
        ("{{ 7 }}", {}, {("on_policy_distillation.teachers.second.tokenizer.chat_template", "unsupported")}),
        ("{{ messages[0].content }}", {"max_rollout_turns": 2}, {("grpo.max_rollout_turns", "unsupported")}),
        ("{{ messages[0].content }}", {"topk_logits_k": 40}, set()),
        ("{{ messages[0].content }}", {"topk_logits_k": 41}, {("distillation.topk_logits_k", "too-large")}),
    ],
)
def test_a_teacher_that_reads_texts_may_have_another_tokenizer(several, tmp_path, template, keys, expected):
    def swap(vocabulary):
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    tokens(tmp_path / "other", swap)
    for name in ("teacher", "other"):
        path = tmp_path / name / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": {"type": "Fuse"}}))
        settings = {"chat_template": template} if template else {}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(settings))
    section = dataclasses.replace(several.grpo, adv_estimator=config.AdvantageConfig("opd"))
    recipe = dataclasses.replace(several, algorithm="grpo", grpo=section)
    if "topk_logits_k" in keys:
        recipe = dataclasses.replace(several, loss_fn=dataclasses.replace(several.loss_fn, kl_type="gold"))
    section = dataclasses.replace(config.section(recipe), **keys)
    recipe = dataclasses.replace(recipe, **{recipe.algorithm: section})
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, apply_chat_template=True))
    notes = []
    found = named(model_tokenizers.teacher_problems(recipe, tmp_path / "teacher/tokenizer.json", [], notes))
    assert found == expected
    assert notes[-1].startswith("on_policy_distillation.teachers.second: its vocabulary differs")
    assert len(notes) == 1 + ("topk_logits_k" in keys)  # then all teachers read texts


def tokens(folder, change):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content["model"]["vocab"])
    path.write_text(json.dumps(content))


def test_a_teacher_with_the_policys_tokenizer_is_accepted(recipe):
    config.refuse(input_files.problems(recipe))


def test_a_teacher_with_the_policys_tokenizer_reads_whole_answers(recipe):
    recipe = dataclasses.replace(recipe, teacher=dataclasses.replace(recipe.teacher, max_total_sequence_length=31))
    assert named(input_files.problems(recipe)) == {("teacher.max_total_sequence_length", "too-small")}


def test_other_ids_for_the_same_tokens_are_refused(recipe, tmp_path):
    def swap(vocabulary):
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    tokens(tmp_path / "teacher", swap)
    assert named(input_files.problems(recipe)) == {("teacher.model_name", "contradiction")}


def test_tokens_missing_from_the_teacher_are_refused(recipe, tmp_path):
    tokens(tmp_path / "teacher", lambda vocabulary: [vocabulary.pop(digit) for digit in "789"])
    assert named(input_files.problems(recipe)) == {("teacher.model_name", "contradiction")}


@pytest.mark.parametrize(("rows", "refused"), [(48, True), (40, False), (39, True)])
def test_a_teacher_with_other_rows_is_refused(recipe, tmp_path, rows, refused):
    """The tokenizer is the same, but the teacher may return rows that the policy lacks, or lack a row of one of its tokens."""
    path = tmp_path / "teacher/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": rows}))
    assert named(input_files.problems(recipe)) == ({("teacher.model_name", "too-large")} if refused else set())


def test_a_missing_teacher_is_refused(recipe, tmp_path):
    (tmp_path / "teacher/config.json").unlink()
    with refused(("teacher.model_name", "file-not-found")):
        config.refuse(input_files.problems(recipe))
