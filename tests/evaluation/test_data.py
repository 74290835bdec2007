"""Questions and worked examples: ids, draws, splits, and data that are missing or wrong, before and in the job."""

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest

from launch.preflight import evaluation_data, user_imports
from pipeline.algorithms.evaluate import TaskConfig, TaskDataConfig
from pipeline.config import RECIPES, inspect
from pipeline.evaluation import task_data
from tests.data.data_formats import WRITERS
from tests.evaluation.sample_records import write
from tests.problems import named, refused

KEY = "evaluate.tasks.quiz.data"


def rows(folder: Path, **splits: list[dict]) -> Path:
    for name, records in splits.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def numbered(count: int, word: str = "q") -> list[dict]:
    return [{"prompt": f"{word}{i}", "answer": str(i)} for i in range(count)]


def task(given: dict[str, Any], seed: int = 1234, **keys: Any) -> TaskConfig:
    return TaskConfig(
        data=TaskDataConfig(**{key: str(v) if isinstance(v, Path) else v for key, v in given.items()}), seed=seed, **keys
    )


def prompts(found: task_data.TaskData) -> list[Any]:
    return [question.prompt for question in found.questions]


def test_a_folder_of_splits_and_a_file_hold_the_same_questions(tmp_path: Path):
    rows(tmp_path, test=numbered(4))
    of_folder = task_data.read("quiz", task({"data_path": tmp_path}))
    assert of_folder == task_data.read("quiz", task({"data_path": tmp_path / "test.jsonl"}))
    assert prompts(of_folder) == ["q0", "q1", "q2", "q3"] and of_folder.examples == {}


@pytest.mark.parametrize("form", ["parquet", "csv", "json", "jsonl.gz"])
def test_questions_in_every_format_are_those_of_json_lines(tmp_path: Path, monkeypatch, form: str):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows(tmp_path / "lines", test=numbered(4))
    (tmp_path / "other").mkdir()
    WRITERS[form](tmp_path / f"other/test.{form}", numbered(4))
    expected = task_data.read("quiz", task({"data_path": tmp_path / "lines"}))
    for path in (tmp_path / "other", tmp_path / f"other/test.{form}"):
        assert task_data.read("quiz", task({"data_path": path})) == expected


def test_subsets_are_joined(tmp_path: Path):
    rows(tmp_path / "a", test=numbered(2, "a"))
    rows(tmp_path / "b", test=numbered(1, "b"))
    found = task_data.read("quiz", task({"data_path": tmp_path, "subset": "b, a"}))
    assert prompts(found) == ["b0", "a0", "a1"] and [question.index for question in found.questions] == [0, 1, 2]


def test_ids_are_the_same_in_every_run_and_follow_the_content(tmp_path: Path):
    rows(tmp_path, test=[*numbered(2), *numbered(2)])
    before = [question.id for question in task_data.read("quiz", task({"data_path": tmp_path})).questions]
    assert before == [question.id for question in task_data.read("quiz", task({"data_path": tmp_path})).questions]
    assert len(set(before)) == 4 and [one.split("-")[0] for one in before] == ["0", "1", "2", "3"]
    rows(tmp_path, test=[{"prompt": "q0", "answer": "5"}, *numbered(2)[1:], *numbered(3)])
    after = [question.id for question in task_data.read("quiz", task({"data_path": tmp_path})).questions]
    assert after[0] != before[0] and after[1:4] == before[1:4]


def test_own_ids_are_kept_where_they_are_unique(tmp_path: Path):
    rows(tmp_path, test=[{"prompt": "x", "answer": "1", "name": name} for name in ("a", "b", "b")])
    found = task_data.read("quiz", task({"data_path": tmp_path}, format_kwargs={"id_key": "name"}))
    first, second, third = (question.id for question in found.questions)
    assert first == "a" and second.startswith("1-") and third.startswith("2-")


def test_max_samples_are_drawn_with_the_seed_and_grow(tmp_path: Path):
    rows(tmp_path, test=numbered(50))
    few, more, other = (
        [question.index for question in task_data.read("quiz", task({"data_path": tmp_path, "max_samples": n}, seed)).questions]
        for n, seed in ((5, 1), (10, 1), (10, 2))
    )
    assert len(few) == 5 and set(few) < set(more) and more == sorted(more) and more != other


def test_a_generated_set_a_callable_and_a_saved_one(tmp_path: Path):
    keys = {"prompt_key": "input"}
    generated = task({"dataset_name": "scratchpad_addition", "split": "validation", "kwargs": {"size": 5}}, format_kwargs=keys)
    assert len(task_data.read("quiz", generated).questions) == 5
    made = task({"dataset_name": "tests.evaluation.test_data.three_questions", "split": "test"})
    assert prompts(task_data.read("quiz", made)) == ["test 0", "test 1", "test 2"]
    datasets.DatasetDict({"test": datasets.Dataset.from_list(numbered(2))}).save_to_disk(tmp_path / "saved")
    assert prompts(task_data.read("quiz", task({"dataset_name": tmp_path / "saved"}))) == ["q0", "q1"]


def three_questions(split: str, seed: int) -> list[dict]:
    return [{"prompt": f"{split} {i}", "answer": "1"} for i in range(3)]


# ---- worked examples -------------------------------------------------------------------------------------------------------


def shown(found: task_data.TaskData) -> list[list[Any]]:
    return [[example.prompt for example in found.examples[question.id]] for question in found.questions]


def test_examples_are_drawn_as_lm_evaluation_harness_draws_them(tmp_path: Path):
    """One generator for all questions: `Random(1234).sample(docs, n)` for each in turn."""
    rows(tmp_path, test=numbered(6), train=numbered(20, "e"))
    draws, pool = random.Random(1234), [f"e{i}" for i in range(20)]
    expected = [draws.sample(pool, 3) for _ in range(6)]
    given = {"data_path": tmp_path, "few_shot_split": "train"}
    assert shown(task_data.read("quiz", task(given, num_few_shot=3))) == expected
    some = task_data.read("quiz", task({**given, "max_samples": 2}, num_few_shot=3))
    assert shown(some) == [expected[question.index] for question in some.questions]


def test_examples_of_the_questions_own_split_leave_it_out(tmp_path: Path):
    rows(tmp_path, test=numbered(6))
    draws, places = random.Random(1234), range(6)
    expected = [[f"q{i}" for i in draws.sample(places, 4) if i != place][:3] for place in places]
    assert shown(task_data.read("quiz", task({"data_path": tmp_path}, num_few_shot=3))) == expected
    first = shown(task_data.read("quiz", task({"data_path": tmp_path}, num_few_shot=2, few_shot_choice="first")))
    assert first[:3] == [["q1", "q2"], ["q0", "q2"], ["q0", "q1"]]


def test_equal_records_are_no_examples_of_each_other(tmp_path: Path):
    rows(tmp_path, test=[*numbered(2), *[{"prompt": "same", "answer": "1"}] * 4])
    found = shown(task_data.read("quiz", task({"data_path": tmp_path}, num_few_shot=2)))
    assert [set(examples) for examples in found[2:]] == [{"q0", "q1"}] * 4


def test_too_few_examples(tmp_path: Path):
    rows(tmp_path, test=numbered(3), train=numbered(2))
    for choice in ("first", "random"):
        with refused(("evaluate.tasks.quiz.num_few_shot", "too-large")):
            task_data.read(
                "quiz", task({"data_path": tmp_path, "few_shot_split": "train"}, num_few_shot=3, few_shot_choice=choice)
            )


# ---- what is missing or wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({}, "missing-value"),
        ({"data_path": "nowhere.jsonl"}, "file-not-found"),
        ({"dataset_name": "nobody/nothing"}, "unavailable-dataset"),
        ({"dataset_name": "a/b", "data_path": "c"}, "contradiction"),
    ],
)
def test_data_that_cannot_be_read(given: dict, code: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with refused((KEY if "data_path" not in given or code == "contradiction" else f"{KEY}.data_path", code)):
        task_data.read("quiz", task(given))


def test_wrong_records_are_named_by_line(tmp_path: Path):
    rows(tmp_path, test=[*numbered(1), {"prompt": "x"}])
    with refused((KEY, "bad-record")) as error:
        task_data.read("quiz", task({"data_path": tmp_path}))
    assert "test.jsonl:2: has no 'answer'; it has: prompt. Try format_kwargs.answer_key=COLUMN" in str(error.value)
    (tmp_path / "test.jsonl").write_text("{'prompt'}\n")
    with refused((KEY, "bad-record")):
        task_data.read("quiz", task({"data_path": tmp_path}))


@pytest.mark.parametrize("bad", ["{'prompt'}\n", "[1]\n", '{"prompt": "x"}\n', '{"prompt": "\\ud800", "answer": []}\n'])
def test_bad_records_are_dropped_and_counted(tmp_path: Path, bad: str):
    lines = [json.dumps(record) + "\n" for record in numbered(4)]
    path = tmp_path / "test.jsonl"
    path.write_text(bad + "".join(lines[:2]) + bad + "".join(lines[2:]))
    given = {"data_path": path, "bad_records": "drop"}
    found = task_data.read("quiz", task(given, num_few_shot=3))
    assert prompts(found) == ["q0", "q1", "q2", "q3"] and found.dropped.count == 2
    assert {len(examples) for examples in found.examples.values()} == {3}
    (warning,) = found.dropped.warnings
    assert warning.startswith("dropped 2 bad records (") and "test.jsonl:1" in warning
    assert len(task_data.read("quiz", task(given | {"max_samples": 3})).questions) == 3
    with refused((KEY, "bad-record")):
        task_data.read("quiz", task({"data_path": path}))
    path.write_text(bad * 2)
    with refused((KEY, "bad-record")) as error:
        task_data.read("quiz", task(given))
    assert "none of 2 records" in str(error.value)


def test_bad_records_may_be_dropped_before_submission(tmp_path: Path):
    overrides = write(tmp_path, ("gsm8k", "minerva_math", "math500", "aime24", "aime25"))
    path = tmp_path / "math500/test.jsonl"
    path.write_text("[]\n" + path.read_text())
    assert named(checked("math", tmp_path, *overrides)) == {("evaluate.tasks.math500.data.data_path", "bad-record")}
    assert checked("math", tmp_path, *overrides, "evaluate.tasks.math500.data.bad_records=drop") == []


def test_a_file_has_one_split(tmp_path: Path):
    rows(tmp_path, test=numbered(3))
    given = {"data_path": tmp_path / "test.jsonl", "few_shot_split": "train"}
    with refused((f"{KEY}.data_path", "contradiction")):
        task_data.read("quiz", task(given, num_few_shot=1))
    assert len(task_data.read("quiz", task(given)).questions) == 3


def test_a_missing_split_or_file_is_named_with_what_to_try(tmp_path: Path):
    rows(tmp_path / "a", train=numbered(1))
    with refused((f"{KEY}.data_path", "file-not-found")) as error:
        task_data.read("quiz", task({"data_path": tmp_path, "subset": "a"}))
    assert f"Try {KEY}.split or {KEY}.subset: the folder has a/train.jsonl" in str(error.value)
    with refused((f"{KEY}.data_path", "file-not-found")) as error:
        task_data.read("quiz", task({"data_path": tmp_path / "none.jsonl"}))
    assert "none.jsonl. Try a path from the recipe's file" in str(error.value)
    with refused((f"{KEY}.split", "not-a-choice")) as error:
        task_data.read("quiz", task({"dataset_name": tmp_path / "a", "split": "tset"}))
    assert "got tset; expected a split of" in str(error.value)


def test_wrong_formats():
    with refused(("evaluate.tasks.quiz.format", "not-importable")):
        task_data.read("quiz", TaskConfig(format="nowhere.Format"))
    with refused(("evaluate.tasks.quiz.format", "wrong-type")):
        task_data.read("quiz", TaskConfig(format="tests.evaluation.test_data.three_questions"))
    with refused(("evaluate.tasks.quiz.format_kwargs.prompt", "unknown-key")):
        task_data.read("quiz", TaskConfig(format_kwargs={"prompt": "x"}))


# ---- before submission -----------------------------------------------------------------------------------------------------


def checked(suite: str, folder: Path, *overrides: str) -> list:
    values = ["policy.model_name=m", "name=n", f"run_dir={folder}", *overrides]
    return list(evaluation_data.problems(inspect(str(RECIPES / "suites" / f"{suite}.yaml"), values).recipe))


def test_missing_data_are_named_with_the_command_that_fetches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    found = checked("math", tmp_path)
    tasks = ("gsm8k", "minerva_math", "math500", "aime24", "aime25")
    assert named(found) == {(f"evaluate.tasks.{name}.data.dataset_name", "unavailable-dataset") for name in tasks}
    assert "hf download --repo-type dataset HuggingFaceH4/MATH-500" in str(found)


def test_a_format_of_ones_own_is_imported_before_submission(tmp_path: Path):
    overrides = ["policy.model_name=m", "name=n", f"run_dir={tmp_path}", "evaluate.tasks.addition.format=nowhere.Format"]
    recipe = inspect(str(RECIPES / "suites/tiny.yaml"), overrides).recipe
    found = user_imports.problems(recipe, "local", [], user_imports.probe(recipe))
    assert named(found) == {("evaluate.tasks.addition.format", "not-importable")}


def test_good_data_pass_the_checks_before_submission(tmp_path: Path):
    assert checked("math", tmp_path, *write(tmp_path, ("gsm8k", "minerva_math", "math500", "aime24", "aime25"))) == []
    assert checked("science", tmp_path, *write(tmp_path, ("gpqa_diamond", "mmlu", "mmlu_pro", "arc_challenge"))) == []


def test_a_split_that_a_folder_lacks_is_refused_before_submission(tmp_path: Path):
    folder = rows(tmp_path / "rows", test=numbered(2), train=numbered(2))
    key = "evaluate.tasks.addition.data"
    data = f"{{_override_: true, dataset_name: {folder}, split: tset}}"
    (problem,) = checked("tiny", tmp_path, f"{key}={data}")
    assert (problem.key, problem.code) == (f"{key}.split", "not-a-choice") and "train, test" in str(problem)


def test_faults_found_before_submission(tmp_path: Path):
    overrides = write(tmp_path, ("gsm8k", "minerva_math", "math500", "aime24", "aime25"))
    (tmp_path / "gsm8k/main/train.jsonl").unlink()
    (tmp_path / "minerva_math/geometry/test.jsonl").write_text('{"problem": "1+1?", "solution": "2"}\n' * 3)
    (tmp_path / "math500/test.jsonl").write_text('{"problem": "1+1?", "solution": "2"}\n[]\n')
    (tmp_path / "aime24/train.jsonl").write_text("")
    found = checked("math", tmp_path, *overrides, "evaluate.tasks.aime25.format_kwargs.x=1")
    assert named(found) == {
        ("evaluate.tasks.gsm8k.data.data_path", "file-not-found"),
        ("evaluate.tasks.minerva_math.data.data_path", "bad-record"),
        ("evaluate.tasks.math500.data.data_path", "bad-record"),
        ("evaluate.tasks.aime24.data.data_path", "no-records"),
        ("evaluate.tasks.aime25.format_kwargs.x", "unknown-key"),
    }
    text = "\n".join(map(str, found))
    assert "geometry/test.jsonl:1: 'solution' has no \\boxed{...}; expected the final answer in it; no record" in text
    assert "can be used (and in 2 more" in text
    assert "has no 'answer'; it has: problem, solution" in text
