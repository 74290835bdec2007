"""Folders of Parquet and JSONL files, and keys of nested columns: what the dry run reads is what the job reads."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from launch.preflight import input_files
from launch.submission import first_prompt
from pipeline import config
from pipeline.config import DatasetConfig, Recipe
from pipeline.data.columns import recognize_columns
from pipeline.data.datasets import load_records
from pipeline.data.records import RecordReader
from tests.launch.preflight.test_columns import CHAT
from tests.problems import named

SUM = [{"role": "user", "content": "1+1="}]
VERL = {
    "data_source": "sums",
    "prompt": SUM,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
NAMED = ("data.train.input_key=prompt", "data.train.output_key=reward_model.ground_truth")
NOTHING = ("data.train.output_key=output",)  # tiny_grpo names a column


def recipe_of(folder: Path, algorithm: str = "grpo", *overrides: str) -> Recipe:
    model = (f"policy.model_name={config.RECIPES}/tiny", "policy.random_init=true", "needs=[]")
    own = (f"data.train.dataset_name={folder}", "data.train.data_path=null", "data.train.margin_key=null")
    recipe = config.load(f"tiny_{algorithm}", [*own, *model, *overrides])
    assert recipe.data.train is not None
    return replace(recipe, data=replace(recipe.data, train=replace(recipe.data.train, kwargs={})))  # of the generated data


def parquet(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path.parent


def jsonl(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def job_reads(recipe: Recipe) -> tuple[RecordReader, dict]:
    """Return the job's reader and first record of data.train."""
    dataset = recipe.data.train
    assert dataset is not None
    records = load_records(dataset, 0)
    return RecordReader(recipe.data, recognize_columns(recipe, "data.train", dataset, records).dataset), records[0]


@pytest.mark.parametrize(
    ("write", "name", "overrides"), [(parquet, "train-00000-of-00001.parquet", NOTHING), (jsonl, "train.jsonl", NAMED)]
)
def test_verls_columns_are_read_with_and_without_keys(tmp_path, monkeypatch, write, name, overrides):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = write(tmp_path / "rows" / name, VERL)
    write(
        tmp_path / "rows" / f"test.{name.rpartition('.')[2]}", {**VERL, "reward_model": {"style": "rule", "ground_truth": "9"}}
    )
    recipe, notes = recipe_of(folder, "grpo", *overrides, *CHAT), []
    assert named(input_files.problems(recipe, notes=notes)) == set()
    assert any("'reward_model.ground_truth' as the answer" in note for note in notes) == (overrides is NOTHING)
    reader, record = job_reads(recipe)
    assert (reader.question(record), reader.answer(record)) == (SUM, "2")
    assert str(folder / name) in first_prompt.text(recipe)


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_columns_that_the_job_cannot_read_are_refused(tmp_path, write):
    folder = write(tmp_path / "rows" / f"train.{write.__name__}", VERL)
    for key in ("reward_model.truth", "reward_model", "extra_info.split.part"):
        recipe = recipe_of(folder, "grpo", NAMED[0], f"data.train.output_key={key}", *CHAT)
        (problem,) = input_files.problems(recipe)
        assert (problem.key, problem.code) == ("data.train.dataset_name", "bad-record")
        assert "Try data.train.output_key=reward_model.ground_truth" in str(problem)


def test_a_bad_row_is_named_as_the_job_names_it(tmp_path):
    folder = parquet(tmp_path / "rows" / "a.parquet", {"text": "a"}, {"text": " "}, {"text": "b"}, {"text": ""})
    (problem,) = input_files.problems(recipe_of(folder, "sft"))
    assert f"{folder}/a.parquet, row 1 (from 0): 'text' is empty" in str(problem) and "row 3" in str(problem)
    assert named(input_files.problems(recipe_of(folder, "sft", "data.bad_records=drop"))) == set()


def test_every_key_may_be_nested_and_a_column_of_that_name_wins():
    pair = {
        "task": {"chosen": "1+1=2", "margin": 3},
        "rejected": "1+1=3",
        "task.prompt": "1+1=",
        "meta": {"tools": [{"type": "f"}]},
    }
    keys = {"input_key": "task.prompt", "chosen_key": "task.chosen", "margin_key": "task.margin", "tools_key": "meta.tools"}
    reader = RecordReader(config.DataConfig(apply_chat_template=True), DatasetConfig(**keys))
    (chosen, _), margin = reader.pair(pair), reader.margin(pair)
    assert (chosen.messages[0]["content"], chosen.options, margin) == ("1+1=", {"tools": [{"type": "f"}]}, 3.0)
    for key in ("messages_key", "text_key"):
        record = {"a": {"b": [*SUM, {"role": "assistant", "content": "2"}] if key == "messages_key" else "1+1=2"}}
        assert RecordReader(config.DataConfig(apply_chat_template=True), DatasetConfig(**{key: "a.b"})).example(record)
        with pytest.raises(ValueError):
            RecordReader(config.DataConfig(), DatasetConfig(**{key: "a.b"})).example({"a.b": None, **record})


def test_a_folder_that_is_not_certain_is_left_to_the_job_with_a_note(tmp_path):
    folder = parquet(tmp_path / "rows" / "a.parquet", {"x": 1})
    jsonl(folder / "b.jsonl", {"y": 1})
    notes: list[str] = []
    assert named(input_files.problems(recipe_of(folder), notes=notes)) == set()
    assert any(note.startswith("data.train.dataset_name: only the job checks its records") for note in notes)


def test_a_damaged_or_empty_file_is_refused(tmp_path):
    (folder := tmp_path / "rows").mkdir()
    (folder / "a.parquet").write_bytes(b"PAR1 damaged")
    assert named(input_files.problems(recipe_of(folder))) == {("data.train.dataset_name", "unreadable")}
    pyarrow.parquet.write_table(pyarrow.table({"input": pyarrow.array([], pyarrow.string())}), folder / "a.parquet")
    assert named(input_files.problems(recipe_of(folder))) == {("data.train.dataset_name", "no-records")}


def test_a_split_or_a_subset_that_a_folder_lacks_is_refused(tmp_path):
    for name in ("train", "test"):
        folder = jsonl(tmp_path / f"rows/{name}.jsonl", {"input": "1+1=", "output": "2"})
    card = "configs:\n- {config_name: one, data_files: [{split: first, path: x.jsonl}]}\n"
    card += "- {config_name: two, data_files: x.jsonl}"
    carded = jsonl(tmp_path / "carded/x.jsonl", {"input": "1+1=", "output": "2"})
    (carded / "README.md").write_text(f"---\n{card}\n---\n")
    saved = tmp_path / "saved"
    datasets.DatasetDict({"a": datasets.Dataset.from_list([{"input": "1"}])}).save_to_disk(saved)
    for where, options, problem in (
        (folder, {"split": "tran"}, f"data.train.split: got tran; expected a split of {folder}: train, test"),
        (folder, {"subset": "main"}, f"data.train.subset: got main; expected a subset of {folder}: default"),
        (folder, {"split": "train[:50%]+test"}, None),
        (carded, {}, f"data.train.subset: got None; expected a subset of {carded}: one, two"),
        (carded, {"subset": "one"}, f"data.train.split: got train; expected a split of {carded}: first"),
        (carded, {"subset": "two"}, None),
        (saved, {"split": "b"}, f"data.train.split: got b; expected a split of {saved}: a"),
        (saved, {"split": "a"}, None),
    ):
        recipe = recipe_of(where, "grpo", *(f"data.train.{key}={value}" for key, value in options.items()))
        found = [str(found) for found in input_files.problems(recipe) if found.code == "not-a-choice"]
        assert found == ([problem] if problem else [])
