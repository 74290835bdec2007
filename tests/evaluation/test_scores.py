"""scores.json depends on the answers alone, not on their order, and warns about what makes scores doubtful."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.algorithms.evaluate import TaskDataConfig
from pipeline.evaluation import scores
from pipeline.evaluation.statistics import interval, macro_interval
from tests.evaluation.made import Scored, answers, recipe


def summary(kept, **keys):
    return scores.summarize(recipe(), {"arithmetic": (Scored(**{"num_samples": 2, **keys}), kept)})


def test_scores_do_not_depend_on_the_order_of_the_answers():
    kept = answers(group="subject ")
    expected = json.dumps(summary(kept))
    for seed in range(3):
        random.Random(seed).shuffle(kept)
        assert json.dumps(summary(kept)) == expected


def test_the_summary_of_a_task():
    kept = answers(group="subject ")
    of = summary(kept)["tasks"]["arithmetic"]
    by_question = [[kept[2 * i].score, kept[2 * i + 1].score] for i in range(40)]
    expected = interval(by_question)
    assert of["metrics"] == {"accuracy": {"value": expected.value, "low": expected.low, "high": expected.high}}
    assert (of["metric"], of["questions"], of["samples"]) == ("accuracy", 40, 80)
    assert {name: group["questions"] for name, group in of["groups"].items()} == {
        f"subject {i}": [14, 13, 13][i] for i in range(3)
    }
    assert of["macro"]["accuracy"]["value"] == macro_interval([by_question[i::3] for i in range(3)]).value
    assert summary(kept)["warnings"] == []


class Weighed(Scored):
    """Its metric gives the first question twice the weight of the others that it is given."""

    def metrics(self, answers):
        (values,) = super().metrics(answers).values()
        share = len(values) / (len(values) + 1)
        first = min(values)
        return {"weighed": {id: [share * (1 + (id == first)) * score for score in of] for id, of in values.items()}}


def test_a_group_has_the_weights_of_its_own_questions():
    kept = [replace(answer, score=1.0) for answer in answers(group="subject ")]
    of = scores.summarize(recipe(), {"task": (Weighed(num_samples=2), kept)})["tasks"]["task"]
    found = [of["metrics"], *(group["metrics"] for group in of["groups"].values()), of["macro"]]
    assert [each["weighed"]["value"] for each in found] == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"finish": "length"}, "2.0% of the answers were cut by the limit of 1024 tokens"),
        ({"metrics": {"unparsed": 1.0}}, "the parser found no answer in 2.0% of the responses"),
        ({"score": None}, "2 of 100 answers could not be judged"),
    ],
)
def test_doubtful_scores_are_warned_about(change, said):
    kept = answers(50)
    once, twice = [replace(kept[0], **change), *kept[1:]], [replace(kept[0], **change), replace(kept[1], **change), *kept[2:]]
    (warning,) = summary(twice)["warnings"]
    assert said in warning
    assert len(summary(once)["warnings"]) == ("score" in change)  # 1% of the answers


def test_missing_answers_and_a_draw_of_the_questions_are_warned_about():
    assert summary(answers()[:-1])["warnings"] == ["arithmetic: 1 of 80 answers are missing"]
    (drawn,) = summary(answers(), data=TaskDataConfig(max_samples=40))["warnings"]
    assert "40 questions were drawn" in drawn
    assert summary(answers(), data=TaskDataConfig(max_samples=41))["warnings"] == []


def test_a_judged_answer_replaces_an_unjudged_one():
    kept = answers()
    unjudged = [replace(kept[0], score=None, failure="no reply"), *kept[1:]]
    assert summary([*unjudged, kept[0]]) == summary([kept[0], *unjudged]) == summary(kept) != summary(unjudged)


def test_the_run_and_its_step_are_named(tmp_path):
    found = scores.summarize(recipe("runs/a", 5), {})
    assert (found["run"], found["step"], found["suite"], found["model"]) == ("runs/a", 5, "math", "models/tiny")
    path = scores.write(tmp_path, summary([]), {})
    assert path == Path(tmp_path / "scores.json") and "has no answer" in json.loads(path.read_text())["warnings"][0]


def test_the_training_run_shows_scores_by_step_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (10, 5):  # follow jobs may end in any order
        found = scores.summarize(recipe(str(tmp_path), step), {"add": (Scored(num_samples=2), answers(step))})
        scores.show(found)
    shown = EventAccumulator(str(tmp_path / "tensorboard/evaluations/math"))
    shown.Reload()
    assert sorted(shown.Tags()["scalars"]) == ["add/accuracy", "add/accuracy_high", "add/accuracy_low"]
    assert [event.step for event in shown.Scalars("add/accuracy")] == [10, 5]
    assert shown.Scalars("add/accuracy_low")[1].value == pytest.approx(found["tasks"]["add"]["metrics"]["accuracy"]["low"])
    scores.show({**found, "step": None})
    scores.show({**found, "run": str(tmp_path / "moved")})
    (tmp_path / "tensorboard/evaluations/other").touch()
    scores.show({**found, "suite": "other"})  # cannot be written, and raises nothing
    assert not (tmp_path / "moved").exists() and len([*(tmp_path / "tensorboard/evaluations/math").iterdir()]) == 2
