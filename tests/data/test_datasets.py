import json
from pathlib import Path

import datasets
import pytest

from pipeline.config import DatasetConfig
from pipeline.data.datasets import load_records
from tests.problems import refused


def test_jsonl_is_read_back_record_by_record(tmp_path: Path):
    records = [{"input": f"{i}·é" * i, "output": i} for i in range(50)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(r, ensure_ascii=i % 2 == 0) for i, r in enumerate(records)) + "\n\n")
    loaded = load_records(DatasetConfig(data_path=str(path)), seed=0)
    assert len(loaded) == 50
    assert [loaded[i] for i in (49, 0, 17)] == [records[i] for i in (49, 0, 17)]
    assert list(loaded) == records


@pytest.mark.parametrize(
    ("line", "message"),
    [("{'input': 1}", r"a\.jsonl:3: not JSON"), ("[1, 2]", r"a\.jsonl:3: .*list"), ('{"a": "', ":3: not JSON")],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "1"}\n\n' + line + '\n{"input": "2"}\n')
    with pytest.raises(ValueError, match=message):
        load_records(DatasetConfig(data_path=str(path)), seed=0)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input": "1"}\n{"input": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2"):
        load_records(DatasetConfig(data_path=str(path)), seed=0)


def test_an_empty_file_is_an_error(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    with refused(("data", "no-records")):
        load_records(DatasetConfig(data_path=str(tmp_path / "a.jsonl")), seed=0)


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path):
    rows = datasets.Dataset.from_list([{"input": "a", "output": "b"}, {"input": "c", "output": "d"}])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    assert load_records(DatasetConfig(dataset_name=str(tmp_path / "one")), seed=0)[1] == {"input": "c", "output": "d"}
    splits = load_records(DatasetConfig(dataset_name=str(tmp_path / "splits"), split="test"), seed=0)
    assert list(splits) == [{"input": "c", "output": "d"}]
    with refused(("data.split", "not-a-choice")):
        load_records(DatasetConfig(dataset_name=str(tmp_path / "splits"), split="validation"), seed=0)


def test_a_folder_of_files_through_load_dataset(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"input": "a"}\n{"input": "b"}\n')
    dataset = DatasetConfig(dataset_name=str(tmp_path / "data"), kwargs={"cache_dir": str(tmp_path / "cache")})
    assert [record["input"] for record in load_records(dataset, seed=0)] == ["a", "b"]


def test_a_generated_set_takes_the_runs_seed_unless_it_has_one():
    def inputs(run_seed: int, **kwargs: int) -> list[str]:
        dataset = DatasetConfig(dataset_name="scratchpad_addition", kwargs={"size": 20, **kwargs})
        return [record["input"] for record in load_records(dataset, run_seed)]

    assert inputs(1) == inputs(1) != inputs(2)
    assert inputs(1, seed=5) == inputs(2, seed=5)


def test_one_source_must_be_named():
    for dataset in (DatasetConfig(), DatasetConfig(dataset_name="scratchpad_addition", data_path="a.jsonl")):
        with refused(("data", "missing-value")):
            load_records(dataset, seed=0)
