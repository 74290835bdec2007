"""Names of tasks of lm-evaluation-harness, in the files of the installed package."""

from pathlib import Path

import pytest

from launch.preflight import evaluation_data
from pipeline.algorithms.evaluate import EvaluateConfig, LmEvalConfig, TaskConfig, TaskDataConfig
from pipeline.config import Recipe

OWN = "task: riddles\ndataset_path: json\ndataset_kwargs: {data_files: {test: riddles.jsonl}}\n"


def problems(section: EvaluateConfig) -> list[tuple[str, str]]:
    return [
        (problem.key, problem.message)
        for problem in evaluation_data.harness_problems(Recipe(algorithm="evaluate", evaluate=section))
    ]


@pytest.mark.parametrize("name", ["hellaswag", "mmlu", "mmlu_anatomy", "ai2_arc", "arc", "lambada", "documents", "paloma"])
def test_tasks_groups_tags_and_other_names_of_the_suites_are_known(name):
    task = TaskConfig(kind="lm_eval", format=name, data=TaskDataConfig(data_path="records.jsonl"))
    assert problems(EvaluateConfig({"it": task})) == []


def test_a_wrong_name_is_refused_with_the_nearest():
    suite = EvaluateConfig({"it": TaskConfig(kind="lm_eval", format="hellaswga"), "other": TaskConfig(format="hellaswga")})
    expected = "got hellaswga; expected a task of lm-evaluation-harness. Try hellaswag"
    assert problems(suite) == [("evaluate.tasks.it.format", expected)]
    (key, message), *_ = problems(EvaluateConfig(lm_eval=LmEvalConfig(["piqa", "zzzzzz", "mmlu_*"])))
    assert key == "evaluate.lm_eval.tasks" and message.startswith("got zzzzzz; expected a task of lm-evaluation-harness. Try a")


def test_tasks_of_the_users_folder_are_known(tmp_path: Path):
    (tmp_path / "riddles.yaml").write_text(OWN)
    section = EvaluateConfig(lm_eval=LmEvalConfig(["riddles"]))
    assert [key for key, _ in problems(section)] == ["evaluate.lm_eval.tasks"]
    section.lm_eval.include_path = str(tmp_path)
    assert problems(section) == []
    (tmp_path / "riddles.yaml").write_text("task: riddles\n")
    ((key, message),) = problems(section)
    assert key == "evaluate.lm_eval.tasks" and "no dataset_path" in message and "Try `dataset_path: json`" in message


def test_data_that_are_not_prepared_are_refused_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    section = EvaluateConfig(lm_eval=LmEvalConfig(["mmlu", "hellaswag", "ai2_arc"]))
    mmlu, hellaswag, easy = [message for _, message in problems(section)]
    assert mmlu.startswith("got mmlu; expected its data set cais/mmlu (") and "and 56 more" in mmlu
    assert hellaswag.startswith(f"got hellaswag; expected its data set Rowan/hellaswag in the local cache {tmp_path}. Try ")
    assert easy.startswith("got ai2_arc; expected its data set allenai/ai2_arc (ARC-Challenge and 1 more)")
    for folder in ("Rowan___hellaswag/default", "allenai___ai2_arc/ARC-Easy"):
        (tmp_path / folder).mkdir(parents=True)
    mmlu, arc = [message for _, message in problems(section)]
    assert arc.startswith("got ai2_arc; expected its data set allenai/ai2_arc (ARC-Challenge) in the local cache")


def test_a_task_of_the_suite_needs_the_harnesss_data_only_without_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    task = TaskConfig(kind="lm_eval", format="piqa")
    assert [key for key, _ in problems(EvaluateConfig({"it": task}))] == ["evaluate.tasks.it.format"]
    task.data.data_path = "piqa.jsonl"
    assert problems(EvaluateConfig({"it": task})) == []


def test_tasks_that_run_code_of_the_model_are_refused():
    ((key, message),) = problems(EvaluateConfig({"it": TaskConfig(kind="lm_eval", format="humaneval")}))
    assert key == "evaluate.tasks.it.format" and message.startswith("got humaneval, which runs code that the model writes")
    assert "Try suite=code" in message


@pytest.mark.full  # indexes all of the harness's files
def test_members_of_a_users_group_are_those_of_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pair.yaml").write_text("group: pair\ntask:\n- {group: inner, task: [piqa]}\n- humaneval\n")
    section = EvaluateConfig(lm_eval=LmEvalConfig(["pair"], include_path=str(tmp_path)))
    assert [message[:23] for _, message in problems(section)] == ["got pair with humaneval"]
    (tmp_path / "pair.yaml").write_text("group: pair\ntask: [{group: inner, task: [piqa]}]\n")
    assert [message[:37] for _, message in problems(section)] == ["got pair; expected its data set baber"]
