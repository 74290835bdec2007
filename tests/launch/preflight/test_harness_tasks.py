"""Names of tasks of lm-evaluation-harness, in the files of the installed package."""

from pathlib import Path

import pytest

from launch.preflight import evaluation_data
from pipeline.algorithms.evaluate import EvaluateConfig, LmEvalConfig, TaskConfig
from pipeline.config import Recipe

OWN = "task: riddles\noutput_type: multiple_choice\n"


def problems(section: EvaluateConfig) -> list[tuple[str, str]]:
    return [
        (problem.key, problem.message)
        for problem in evaluation_data.harness_problems(Recipe(algorithm="evaluate", evaluate=section))
    ]


@pytest.mark.parametrize("name", ["hellaswag", "mmlu", "mmlu_anatomy", "ai2_arc", "arc", "lambada", "documents", "paloma"])
def test_tasks_groups_tags_and_other_names_of_the_suites_are_known(name):
    assert problems(EvaluateConfig({"it": TaskConfig(kind="lm_eval", format=name)})) == []


def test_a_wrong_name_is_refused_with_the_nearest():
    suite = EvaluateConfig({"it": TaskConfig(kind="lm_eval", format="hellaswga"), "other": TaskConfig(format="hellaswga")})
    expected = "got hellaswga; expected a task of lm-evaluation-harness. Try hellaswag"
    assert problems(suite) == [("evaluate.tasks.it.format", expected)]
    ((key, message),) = problems(EvaluateConfig(lm_eval=LmEvalConfig(["piqa", "zzzzzz", "mmlu_*"])))
    assert key == "evaluate.lm_eval.tasks" and message.startswith("got zzzzzz; expected a task of lm-evaluation-harness. Try a")


def test_tasks_of_the_users_folder_are_known(tmp_path: Path):
    (tmp_path / "riddles.yaml").write_text(OWN)
    section = EvaluateConfig(lm_eval=LmEvalConfig(["riddles"]))
    assert [key for key, _ in problems(section)] == ["evaluate.lm_eval.tasks"]
    section.lm_eval.include_path = str(tmp_path)
    assert problems(section) == []
