"""A user's function on raw records: several items of one record, dropped records, and exact resumption in between."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.governance import inputs
from launch.preflight import input_files, user_imports
from launch.recipes.trust import Trust
from pipeline import config
from pipeline.config import RECIPES
from pipeline.data.chat import load_tokenizer
from pipeline.data.mixture import build_streams
from pipeline.data.processors import process
from tests.problems import refused

MODULE = """
def made(record):
    number = record["number"]
    if number == 9:
        return {"input": "9+0="}  # no answer
    return [{"input": f"{number}+{i}=", "output": str(number + i)} for i in range(number % 4)] or None
def failing(record): return {"input": record["missing"]}
def text(record): return "text"
def nothing(record): return None
def two(record, other): return record
class Made:
    def __init__(self, record): pass
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch):
    (tmp_path / "my_processors.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_processors", raising=False)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(9)))

    def load(algorithm: str, name: str = "made", *overrides: str) -> config.Recipe:
        keys = ("data.train.dataset_name=null", f"data.train.data_path={path}", "data.validation=null", "needs=[]")
        keys += (f"policy.model_name={RECIPES}/tiny", "policy.random_init=true", f"{algorithm}.max_num_epochs=2")
        keys += (f"{algorithm}.val_at_start=false", f"{algorithm}.val_at_end=false", f"{algorithm}.val_period=0")
        keys += (f"module_folders=[{tmp_path}]", f"data.train.processor=my_processors.{name}")
        loaded = config.load(f"tiny_{algorithm}", [*keys, "data.train.output_key=output", *overrides])
        assert loaded.data.train is not None
        return replace(loaded, data=replace(loaded.data, train=replace(loaded.data.train, kwargs={})))

    return load


def stream_of(recipe):
    return build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))[0]


ITEMS, DROPS = 2 * (4 * 0 + 1 + 2 + 3 + 1 + 2 + 3), 2 * 3  # of numbers 0 to 8, in two epochs


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_resumed_run_sees_the_same_items_wherever_it_stopped(recipe, algorithm):
    made = recipe(algorithm)
    whole = stream_of(made)
    assert whole.usable == ITEMS // 2
    every = whole.take(99)
    assert len(every) == ITEMS and whole.dropped == DROPS
    if algorithm == "grpo":
        assert [item.index for item in every] == list(range(ITEMS))  # the seeds of answers depend on it
    for stop in range(0, ITEMS, 5):
        begun, resumed = stream_of(made), stream_of(made)
        first = begun.take(stop)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        items = [*first, *resumed.take(99)]
        assert [item.tokens.tolist() for item in items] == [item.tokens.tolist() for item in every]
        assert resumed.dropped == DROPS
        if algorithm == "grpo":
            assert [item.index for item in items] == list(range(ITEMS))


def test_a_mixture_numbers_the_items_of_all_its_sets(recipe):
    one = recipe("grpo")
    data = replace(one.data, train=None, datasets={"a": one.data.train, "b": replace(one.data.train, processor=None)})
    data.datasets["b"].data_path = None
    data.datasets["b"].dataset_name, data.datasets["b"].kwargs = "scratchpad_addition", {"size": 30}
    mixed = replace(one, data=data)
    begun, resumed = stream_of(mixed), stream_of(mixed)
    every = stream_of(mixed).take(40)
    first = begun.take(11)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert [item.index for item in every] == list(range(40))
    assert [item.tokens.tolist() for item in [*first, *resumed.take(29)]] == [item.tokens.tolist() for item in every]


def test_the_lineage_has_the_file_of_the_processor(recipe, tmp_path):
    (code,) = (entry for entry in inputs.of_recipe(recipe("sft")) if entry["role"] == "code")
    assert (code["key"], code["path"]) == ("data.train.processor", str(tmp_path / "my_processors.py"))
    assert code["files"][0]["size"] == len(MODULE)


def test_a_processor_may_change_its_record():
    record = {"input": "1", "more": {"list": []}}

    def change(record):
        record["input"] += "!"
        record["more"]["list"].append(1)
        return record

    assert [process(change, "x.change", record) for _ in range(2)] == [{"input": "1!", "more": {"list": [1]}}] * 2
    assert record == {"input": "1", "more": {"list": []}}


def test_dropped_records_are_named(recipe, caplog):
    with caplog.at_level(logging.WARNING):
        stream_of(recipe("sft")).take(99)
    assert "rows.jsonl:1: the processor drops it" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("failing", "rows.jsonl:1: processor my_processors.failing raised KeyError: 'missing'"),
        ("text", "rows.jsonl:1: processor my_processors.text returned a str; expected a dict"),
        ("nothing", "are all too long or invalid. The first: "),
    ],
)
def test_a_processor_that_fails_is_refused_by_the_job_and_before_it(recipe, name, message):
    made = recipe("sft", name)
    with refused(("data", "bad-record")) as error:
        stream_of(made)
    assert message in str(error.value)
    (problem,) = input_files.problems(made, trust=Trust.EVERYTHING)
    assert name == "nothing" or message in problem.message
    assert problem.code == ("no-records" if name == "nothing" else "bad-record")


def test_records_are_checked_as_the_processor_makes_them(recipe, tmp_path):
    made, notes = recipe("sft"), []
    assert list(input_files.problems(made, notes=notes, trust=Trust.EVERYTHING)) == []
    assert any("drops 3 of the first 9 records" in note for note in notes)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"number": 9}\n')
    (problem,) = input_files.problems(made, trust=Trust.EVERYTHING)
    assert "rows.jsonl:10: has no 'output'" in problem.message


def test_a_plan_runs_no_processor_but_reads_its_source(recipe, tmp_path):
    (tmp_path / "my_processors.py").write_text(MODULE + "\nopen(__file__ + '.ran', 'w').close()\n")
    for name, wrong in (
        ("made", None),
        ("two", "expected one of (record)"),
        ("Made", "got a class"),
        ("mad", "did you mean made"),
    ):
        made, notes = recipe("sft", name), []
        assert list(input_files.problems(made, notes=notes, trust=Trust.NOTHING)) == []
        assert any("only the job checks what it makes of the records" in note for note in notes)
        replies = user_imports.probe(made, Trust.NOTHING)
        problems = [str(problem) for problem in user_imports.problems(made, "local", [], replies)]
        assert not problems if wrong is None else wrong in problems[0], problems
    assert not (tmp_path / "my_processors.py.ran").exists()
