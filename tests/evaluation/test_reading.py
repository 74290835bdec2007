"""The launcher finds the evaluations of a run, compares two question by question, and shows them in the report."""

import json
from dataclasses import replace

import pytest

from launch import report
from launch.evaluations import evaluation_job
from launch.runs import evaluation_folder
from launch.runs.evaluation_comparison import compare
from pipeline.config import RecipeError
from tests.evaluation import made
from tests.launch import made_runs
from tests.launch.test_report import HOSTILE, Page
from tests.problems import named


@pytest.fixture
def run(tmp_path):
    """A run with evaluations of three steps, ever better in `add` and unchanged in `sub`."""
    run = made_runs.folder(tmp_path / "run")
    for step, solved in ((0, 0.3), (10, 0.5), (20, 0.9)):
        tasks = {"add": made.answers(60, solved=solved, group="digits "), "sub": made.answers(30, 1, text=HOSTILE)}
        made.evaluation(run, step, tasks)
    return run


def test_evaluations_are_found_by_suite_and_step(run, tmp_path):
    made.evaluation(run, 10, {"add": made.answers()}, suite="nightly")
    (run / "evaluations/math/step_000030").mkdir()  # it has not ended
    found = evaluation_folder.of_run(run)
    assert [(each.suite, each.step, each.label) for each in found] == [
        *(("math", step, f"step {step}") for step in (0, 10, 20)),
        ("nightly", 10, "step 10"),
    ]
    alone = made.evaluation(tmp_path / "alone", None, {"add": made.answers()})
    assert [(each.folder, each.label) for each in evaluation_folder.of_run(alone)] == [(alone, "models/tiny")]
    assert evaluation_folder.of_run(tmp_path / "nothing") == []


@pytest.mark.parametrize(("text", "said"), [("{", "invalid JSON"), ('{"suite": "a"}', "`model`")])
def test_malformed_scores_are_named(run, text, said):
    (run / "evaluations/math/step_000000/scores.json").write_text(text)
    with pytest.raises(RecipeError, match=rf"step_000000/scores\.json: .*{said}") as caught:
        evaluation_folder.of_run(run)
    assert named(caught.value.problems) == {("run_dir", "unreadable")}


def test_two_evaluations_are_compared_question_by_question(run):
    first, _, last = evaluation_folder.of_run(run)
    better, same = compare(first, last)
    assert (better.task, better.difference.verdict, same.difference.verdict) == ("add", "better", "cannot tell")
    assert better.difference.gained == len(better.changed) > 30 and not same.changed and better.unpaired == 0
    most = better.changed[0]
    assert (
        most.change == 1 and [answer.score for answer in most.before] == [0, 0] and most.after[0].prompt.startswith("What is")
    )
    assert better.summary.startswith(f"better: {better.difference.value:+.4f} [")
    assert compare(last, first)[0].difference.verdict == "worse"


def test_answers_without_a_score_and_questions_of_one_side_are_left_out(tmp_path):
    kept = made.answers(10, 1)
    before = made.evaluation(tmp_path / "a", None, {"add": kept})
    after = made.evaluation(tmp_path / "b", None, {"add": [replace(kept[0], score=None), *kept[1:8]]})
    (found,) = compare(evaluation_folder.read(before), evaluation_folder.read(after))
    assert (found.difference.questions, found.unpaired, found.changed) == (7, 3, [])


def test_other_questions_and_other_settings_are_warned_of(run, tmp_path, capsys):
    first, last = run / "evaluations/math/step_000000", made.evaluation(run, 30, {"add": made.answers(24, 1)})
    same = {"num_samples": 2, "temperature": 0.0, "max_new_tokens": 64, "num_few_shot": 0, "format": "records", "top_k": None}
    other = {"num_samples": 1, "temperature": 1.0, "max_new_tokens": 32, "num_few_shot": 5, "format": "gsm8k", "top_k": 20}
    for path, settings in ((first, same), (last, other)):
        (path / "recipe.yaml").write_text(json.dumps({"evaluate": {"tasks": {"add": settings}}}))
    (found,) = compare(evaluation_folder.read(first), evaluation_folder.read(last))
    assert found.warnings == [
        "24 of 60 questions in common",
        "num_samples differs: 2 and 1",
        "temperature differs: 0.0 and 1.0",
        "top_k differs: null and 20",
        "max_new_tokens differs: 64 and 32",
        "num_few_shot differs: 0 and 5",
        "format differs: records and gsm8k",
    ]
    evaluation_job.print_comparison(evaluation_folder.read(first), last)
    assert "\nwarning: add: 24 of 60 questions in common\n" in capsys.readouterr().out
    assert report.main([f"run={run}", f"out={tmp_path / 'r.html'}"]) == 0
    items = Page((tmp_path / "r.html").read_text()).texts["li"]
    assert [f"step 0 → step 30, add: {warning}" for warning in found.warnings] == items
    (last / "recipe.yaml").write_text(": {")
    assert compare(evaluation_folder.read(first), evaluation_folder.read(last))[0].warnings == ["24 of 60 questions in common"]
    assert not compare(evaluation_folder.read(first), evaluation_folder.read(first))[0].warnings


def test_a_single_question_is_shown_without_an_interval(tmp_path, capsys):
    run = made_runs.folder(tmp_path / "run")
    for step, of in ((0, 24), (10, 1)):
        made.evaluation(run, step, {"add": made.answers(of, 1, solved=1)})
    (found,) = compare(*evaluation_folder.of_run(run))
    assert found.summary == "cannot tell: +0.0000 [-], p = 1; 0 questions better, 0 worse, of 1"
    assert found.warnings == ["1 of 24 questions in common"]
    assert report.main([f"run={run}", f"out={tmp_path / 'r.html'}"]) == 0
    assert "+0.0000 [-]" in Page((tmp_path / "r.html").read_text()).texts["td"]


def test_the_report_shows_curves_scores_and_changed_questions(run, tmp_path, capsys):
    assert report.main([f"run={run}", f"out={tmp_path / 'r.html'}"]) == 0
    assert "math, step 20" in (out := capsys.readouterr().out) and "add 0.875 (" in out
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert page.headings() == ["Overview", "Evaluations", "Recipe"]
    band, score = page.charts()["add"]
    value = json.loads((run / "evaluations/math/step_000020/scores.json").read_text())["tasks"]["add"]["metrics"]["accuracy"]
    assert score["x"] == [0, 10, 20] and score["y"][2] == pytest.approx(value["value"], rel=1e-5)
    assert band["customdata"][2] == pytest.approx([value["low"], value["high"]], rel=1e-5)
    assert "step 0 → step 20, question by question" in page.texts["caption"]
    assert page.texts["span"].count("better") == 1 and page.texts["span"].count("cannot tell") == 1
    assert any("20 of " in summary and "changed questions" in summary for summary in page.texts["summary"])
    assert "What is" in "".join(page.texts["pre"]) and "digits 1" in page.texts["th"]


def test_runs_are_compared_and_texts_escaped(run, tmp_path):
    other = made_runs.folder(tmp_path / "other")
    made.evaluation(other, 20, {"add": made.answers(60, solved=0.2), "sub": made.answers(30, 1, solved=0.1, text=HOSTILE)})
    assert report.main([f"run={run}", f"run={other}", f"out={tmp_path / 'r.html'}"]) == 0
    page = Page((tmp_path / "r.html").read_text())
    assert "run, step 20 → other, step 20, question by question" in page.texts["caption"]
    assert page.texts["span"].count("worse") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    hostile = HOSTILE.format().replace("\ud800", "\ufffd")
    assert any(hostile in text for text in page.texts["pre"])
    assert [trace["meta"]["run"] for trace in page.charts()["add"]] == [0, 0, 1, 1]


def test_a_lower_perplexity_is_better(run):
    for path in run.glob("evaluations/math/step_*"):
        for name in ("scores.json", "values.json"):
            (path / name).write_text((path / name).read_text().replace('"accuracy"', '"word_perplexity"'))
    first, _, last = evaluation_folder.of_run(run)
    found = compare(first, last)[0].difference
    assert found.value > 0 and found.verdict == "worse" and found.lost > found.gained
    assert compare(last, first)[0].difference.verdict == "better"


def test_an_evaluation_without_values_is_named(run):
    first, _, last = evaluation_folder.of_run(run)
    (last.folder / "values.json").unlink()
    with pytest.raises(RecipeError, match=r"step_000020/values\.json") as caught:
        compare(first, last)
    assert named(caught.value.problems) == {("run_dir", "unreadable")}
