"""Every format of `data_path` gives the records, tokens and positions of the JSON lines of the same rows."""

import functools
import json
import random
from pathlib import Path

import pytest

from pipeline.config import DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data import arrow_records, row_cache, text_records
from pipeline.data.chat import Encoder
from pipeline.data.datasets import load_records, record_location
from pipeline.data.stream import ExampleStream, PairStream, PromptStream
from tests.data.data_formats import WRITERS
from tests.data.test_turns import AS_MAPPING, QUESTION, TOOL, called, said, tokenizer

TEMPLATE = AS_MAPPING + "{% if thinking is defined and not thinking %}<think></think>{% endif %}"
KEYS = {"input_key": "extra_info.prompt", "output_key": "reward_model.ground_truth"}
OF_ALGORITHM = {
    "sft": (ExampleStream, {"messages_key": "messages"}),
    "dpo": (PairStream, {**KEYS, "chosen_key": "chosen", "rejected_key": "rejected"}),
    "grpo": (PromptStream, KEYS),
}


def row(number: int, arguments: object) -> dict:
    answer = f'uno "{number}"\n, é'
    return {
        "messages": [QUESTION, called(arguments), {"role": "tool", "name": "sky", "content": "no"}, said(answer)],
        "chosen": [called(arguments)],
        "rejected": [said(answer)],
        "tools": [TOOL] if number % 2 else [{**TOOL, "strict": True}],
        "chat_template_kwargs": {"thinking": False} if number % 3 else {"other": number},
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"prompt": f"{number}+1, or [1]", "index": number},
    }


MAPPINGS = [row(number, {"city": "Oslo"} if number % 2 else {"unit": number}) for number in range(7)]
TEXTS = [row(number, json.dumps({"city": "Oslo"} if number % 2 else {"unit": number})) for number in range(7)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch):
    """Convert every Parquet file, in spans of one row group, and read texts in chunks that cut records."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arrow_records, "IN_MEMORY", 0)
    monkeypatch.setattr(arrow_records, "SPAN", 1)
    monkeypatch.setattr(text_records, "CHUNK", 101)
    return row_cache.folder()


def tokens(item) -> list:
    return [part.tokens.tolist() for part in (item if isinstance(item, tuple) else (item,))]


@functools.cache
def encoder_of(algorithm: str) -> Encoder:
    data = DataConfig(max_input_seq_length=999, unknown_tokens="keep")
    return Encoder(tokenizer(TEMPLATE), TokenizerConfig(), data, DatasetConfig(**OF_ALGORITHM[algorithm][1]))


def stream_of(algorithm: str, path: Path):
    dataset = DatasetConfig(data_path=str(path), max_samples=6, **OF_ALGORITHM[algorithm][1])
    return OF_ALGORITHM[algorithm][0](load_records(dataset, 0), encoder_of(algorithm), seed=3, max_num_epochs=2)


QUICK = ("json", "jsonl.gz", "csv", "parquet", "ipc", "saved")
FORMS = [form if form in QUICK else pytest.param(form, marks=pytest.mark.full) for form in WRITERS]


@pytest.mark.parametrize("rows", [MAPPINGS, pytest.param(TEXTS, marks=pytest.mark.full)], ids=["mappings", "texts"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_positions_are_those_of_json_lines(tmp_path: Path, form: str, rows: list[dict]):
    for name in ("jsonl", form):
        WRITERS[name](tmp_path / f"rows.{name}", rows)
    for algorithm in OF_ALGORITHM:
        expected, made = stream_of(algorithm, tmp_path / "rows.jsonl"), stream_of(algorithm, tmp_path / f"rows.{form}")
        items = [tokens(item) for item in expected.take(99)]
        assert len(items) == 12 and items[0] != items[1]
        taken = [tokens(item) for item in made.take(5)]
        resumed = stream_of(algorithm, tmp_path / f"rows.{form}")
        resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
        assert [*taken, *(tokens(item) for item in resumed.take(99))] == items


def random_text(draw: random.Random) -> str:
    return "".join(draw.choice('ab "\\,\n{}[]é\t;') for _ in range(draw.randint(0, 40)))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 100))])
def test_texts_come_back_however_the_file_is_cut(tmp_path: Path, monkeypatch, seed: int):
    draw = random.Random(seed)
    rows = [{"input": random_text(draw), "n": {"a": random_text(draw), "k": number}} for number in range(60)]
    monkeypatch.setattr(text_records, "CHUNK", draw.randint(1, 300))
    for form in ("jsonl", "json", "json.zst", "csv", "tsv"):
        WRITERS[form](tmp_path / f"rows.{form}", rows)
        records = load_records(DatasetConfig(data_path=str(tmp_path / f"rows.{form}")), 0)
        flat = [{"input": record["input"], "n": json.dumps(record["n"])} for record in rows]
        assert list(records) == (flat if form in ("csv", "tsv") else rows)


def test_paths_are_read_in_order_and_records_are_named_by_their_file(tmp_path: Path):
    for name, form in (("b", "jsonl"), ("a", "jsonl"), ("c", "parquet")):
        WRITERS[form](tmp_path / f"{name}.{form}", [{"input": f"{name}{number}"} for number in range(3)])
    listed = DatasetConfig(data_path=[str(tmp_path / "c.parquet"), str(tmp_path / "*.jsonl")])
    records = load_records(listed, 0)
    assert [record["input"] for record in records] == [f"{name}{number}" for name in "cab" for number in range(3)]
    places = [record_location(records, index).removeprefix(f"{tmp_path}/") for index in (1, 4, 8)]
    assert places == ["c.parquet, row 1 (from 0)", "a.jsonl:2", "b.jsonl:3"]


def test_a_folder_gives_the_files_of_a_split(tmp_path: Path):
    for name in ("train-0", "train-1", "test"):
        WRITERS["jsonl"](tmp_path / f"{name}.jsonl", [{"input": name}])
    for split, names in ((None, ["train-0", "train-1"]), ("test", ["test"])):
        for source in ("data_path", "dataset_name"):
            records = load_records(DatasetConfig(split=split, **{source: str(tmp_path)}), 0)
            assert [record["input"] for record in records] == names


def test_a_changed_file_is_converted_anew_and_an_unchanged_one_is_not(tmp_path: Path, cache: Path):
    path = tmp_path / "rows.parquet"
    WRITERS["parquet"](path, [{"input": "a"}, {"input": "b"}, {"input": "c"}])
    dataset = DatasetConfig(data_path=str(path))
    assert load_records(dataset, 0)[2] == {"input": "c"}
    converted = set(cache.iterdir())
    assert len(converted) == 1  # the first rows are not converted until one is read
    assert len(list(load_records(dataset, 0))) == 3 and converted < set(cache.iterdir())
    WRITERS["parquet"](path, [{"input": "x"}] * 4)
    assert load_records(dataset, 0)[2] == {"input": "x"} and len(list(cache.iterdir())) == 3


def test_the_cache_names_its_folder_where_it_cannot_write(tmp_path: Path, monkeypatch):
    (tmp_path / "taken").touch()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "taken"))
    WRITERS["jsonl.gz"](tmp_path / "rows.jsonl.gz", MAPPINGS)
    with pytest.raises(ValueError, match="Try HF_DATASETS_CACHE=FOLDER"):
        load_records(DatasetConfig(data_path=str(tmp_path / "rows.jsonl.gz")), 0)
