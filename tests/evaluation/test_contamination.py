"""Questions that occur in a run's training data are found, and the scores without them are shown."""

import json

import pytest
import yaml

from launch import contamination, report
from launch.evaluations.overlap import OverlapSearch
from pipeline import config
from tests.evaluation import made
from tests.launch import made_runs

LONG = "A farmer has seventeen sheep and all but nine run away; how many sheep does the farmer still have?"
SHORT = "What is the capital of Mongolia?"
CHINESE = "小明有十七只羊除了九只以外都跑掉了请问他现在还剩下多少只羊" * 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"Some text before. {LONG} Nine.", {"long"}),
        (LONG.upper().replace(";", " -- ").replace(" ", "\n"), {"long"}),  # case, punctuation and spaces do not matter
        (" ".join(LONG.split()[:13]), {"long"}),
        (" ".join(LONG.split()[:12]), set()),
        (LONG.replace("seventeen", "eighteen").replace("how many", "what number of"), set()),
        (f"Q: {SHORT} A: Ulaanbaatar", {"short"}),
        ("What is the capital of Mongol history?", set()),
        ("序言" + CHINESE + "结束", {"chinese"}),
        (CHINESE[:40], set()),
        ("", set()),
        ("1+1?", set()),
    ],
)
def test_overlaps(text, found):
    search = OverlapSearch.of({"long": LONG, "short": SHORT, "chinese": CHINESE, "tiny": "1+1?"})
    assert search.unchecked == {"tiny"}
    search.check(text, "here")
    assert set(search.overlaps) == found and all(where == "here" for where, _ in search.overlaps.values())


def test_a_template_of_many_questions_is_no_overlap():
    template = "Answer the following question step by step and put the final answer into a box at the very end"
    questions = {str(i): f"{template}: {LONG if i == 3 else f'is it {i} or {i + 1}'}" for i in range(20)}
    search = OverlapSearch.of(questions)
    search.check(f"{template}: something else", "a")
    assert not search.overlaps
    search.check(f"so {LONG}", "b")
    assert set(search.overlaps) == {"3"} and search.overlaps["3"][0] == "b"


@pytest.fixture
def evaluated(tmp_path):
    """An evaluation of a run whose data contain two of its four questions, one within a conversation."""
    questions = [LONG, SHORT, "How many legs do three spiders and two ants have together?", "Why is the sky blue at noon?"]
    test = tmp_path / "test.jsonl"
    test.write_text(
        "".join(json.dumps({"prompt": each, "answer": "9", "id": f"q{i}"}) + "\n" for i, each in enumerate(questions))
    )
    train = tmp_path / "train.jsonl"
    records = [{"input": "Hello", "output": "5"}, {"input": f"Think. {LONG}", "output": "9"}, {"input": SHORT, "output": "U"}]
    train.write_text("".join(json.dumps(each) + "\n" for each in records))
    run = made_runs.folder(tmp_path / "run", "tiny_sft", f"data.train.data_path={train}", "data.train.dataset_name=null")
    task = {"env_name": "math", "format_kwargs": {"id_key": "id"}, "data": {"data_path": str(test)}}
    suite = {"algorithm": "evaluate", "evaluate": {"tasks": {"add": task}}, "env": {"math": {"kind": "exact_match"}}}
    suite["policy"] = {"model_name": "Qwen/Qwen3-0.6B", "max_total_sequence_length": 512}
    (tmp_path / "math.yaml").write_text(yaml.safe_dump(suite))
    path = run / "evaluations/math/step_000005"
    path.mkdir(parents=True)
    config.write(config.load(str(tmp_path / "math.yaml"), [f"run_dir={path}"]), path / "recipe.yaml")
    ids = [f"q{i}" for i in range(4)]
    kept = [made.Answer(id, 0, float(i < 2), prompt=questions[i], text="9", finish="stop") for i, id in enumerate(ids)]
    made.evaluation(run, 5, {"add": kept, "else": made.answers(3)})
    return run, path


def test_the_command_flags_questions_and_scores_the_others(evaluated, tmp_path, capsys):
    run, path = evaluated
    assert contamination.main([f"evaluation={path}"]) == 0
    out = capsys.readouterr().out
    assert (
        "add: 2 of 4 questions occur in the training data; accuracy 0.500, without these questions 0.000, of these alone 1.000"
        in out
    )
    assert "else: not checked" in out
    found = json.loads((path / "contamination.json").read_text())
    assert (found["records"], found["words"], found["run"]) == (3, 13, str(run))
    wheres = [each["where"] for each in found["tasks"]["add"]["overlaps"]]
    assert [where.partition(", ")[2] for where in wheres] == ["record 1", "record 2"]
    assert report.main([f"run={run}", f"out={tmp_path / 'r.html'}"]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "Questions that occur in the training data" in text and "2 of 4" in text


def test_faulty_requests_are_refused(tmp_path, capsys):
    assert contamination.main([f"evaluation={tmp_path}"]) == 2 and "expected a complete evaluation" in capsys.readouterr().err
    alone = made.evaluation(tmp_path / "alone", None, {"add": made.answers(4)})
    assert contamination.main([f"evaluation={alone}"]) == 2 and "belongs to no run" in capsys.readouterr().err
