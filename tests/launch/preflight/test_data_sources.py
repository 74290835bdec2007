"""Data files that cannot be read are refused before submission, with what they seem to be and what to try."""

import functools
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from launch.preflight import input_files
from launch.recipes.trust import Trust
from pipeline.config import Recipe
from pipeline.data import file_formats
from pipeline.recipe import user_files
from tests.data import hub
from tests.data.data_formats import WRITERS
from tests.launch.preflight.test_columns import CHAT
from tests.launch.preflight.test_data_folders import NAMED, VERL, recipe_of

ROWS = [{"input": f"{number}+1=", "output": str(number + 1)} for number in range(6)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TABLE = pyarrow.BufferOutputStream()
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), TABLE)
PARQUET = TABLE.getvalue().to_pybytes()
EMPTY = pyarrow.BufferOutputStream()
pyarrow.parquet.write_table(pyarrow.table({"input": pyarrow.array([], pyarrow.string())}), EMPTY)
LARGE = gzip.compress(LINES * 10)

FILES = {
    "cut.parquet": (PARQUET[:-50], "unreadable", "got a file without its end"),
    "damaged.parquet": (PARQUET[:10] + b"\0" * 60 + PARQUET[70:], "unreadable", "cut or damaged"),
    "json.parquet": (LINES, "bad-format", "got JSON lines; expected Parquet, as the suffix says. Try the suffix .jsonl"),
    "page.parquet": (b"<!DOCTYPE html>", "bad-format", "got an HTML page; expected Parquet"),
    "empty.parquet": (EMPTY.getvalue().to_pybytes(), "no-records", "is empty"),
    "nothing.parquet": (b"", "bad-format", "got an empty file; expected Parquet"),
    "nothing.jsonl": (b"", "no-records", "is empty"),
    "array.json": (b"[]", "no-records", "is empty"),
    "cut.json": (json.dumps(ROWS).encode()[:-20], "bad-format", "ends inside record 5 (from 0)"),
    "numbers.json": (b"[1, 2]", "bad-record", "got a list; expected a JSON object"),
    "mixed.json": (b'[{"input": "1", "output": "2"}, 5]', "bad-record", "record 0 (from 0): not JSON"),
    "object.json": (json.dumps({"data": ROWS}, indent=1).encode(), "bad-format", "one JSON object over several lines"),
    "ragged.csv": (b"input,output\n1,2\n3,4,5\n", "bad-record", "record 1 (from 0): got a row of 3; expected 2 cells"),
    "latin.csv": ("input,output\n1,2\nb,\xfc\n".encode("latin1"), "bad-record", "got byte 0xfc, not UTF-8"),
    "wide.csv": ("input,output\n1,2\n".encode("utf-16"), "bad-format", "got text in UTF-16"),
    "semicolon.csv": (b"input;output\n1;2\n", "bad-format", "expected columns between commas"),
    "quote.csv": (b'input,output\n5" pipe,2\nb,3\n', "bad-record", "an odd quote"),
    "twice.csv": (b"input,input\na,b\n", "bad-format", "two columns 'input'"),
    "header.csv": (b"input,output\n", "no-records", "is empty"),
    "names.csv": (b"question,gold\na,b\n", "bad-record", "Try data.train.input_key=question data.train.output_key=gold"),
    "cut.jsonl.gz": (LARGE[:-12], "unreadable", "cut or damaged: Compressed file ended"),
    "plain.jsonl.gz": (LINES, "bad-format", "got JSON lines; expected a compressed file"),
    "a.parquet.gz": (gzip.compress(PARQUET), "bad-format", "got Parquet inside .gz"),
    "a.xlsx": (b"PK\x03\x04", "bad-format", "a spreadsheet"),
    "a.txt": (b"input,output\n1,2\n", "bad-format", "Try the suffix .csv"),
}


@functools.cache
def loaded(algorithm: str, *overrides: str) -> Recipe:
    none = ("data.train.dataset_name=null", "data.train.data_path=rows.jsonl")
    return recipe_of(Path("/"), algorithm, *none, *overrides)


def found(path: Path | str | list[str], *overrides: str, algorithm: str = "sft") -> list[tuple[str, str, str]]:
    """Return (key, code, message) of the problems of data.train.data_path."""
    recipe = loaded(algorithm, *overrides)
    train = replace(recipe.data.train, data_path=path if isinstance(path, list) else str(path))
    recipe = replace(recipe, data=replace(recipe.data, train=train, validation=None))
    problems = input_files.problems(recipe, trust=Trust.EVERYTHING)
    return [(problem.key, problem.code, problem.message) for problem in problems]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str):
    content, code, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    (problem,) = found(tmp_path / name)
    assert problem[:2] == ("data.train.data_path", code) and message in problem[2]
    assert str(tmp_path / name) in problem[2]


def files(folder: Path, **contents: bytes) -> Path:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_a_folder_or_a_glob_without_clear_files_is_refused(tmp_path: Path):
    os.mkfifo(files(tmp_path / "pipe") / "a.parquet")
    for path, code, message in (
        (files(tmp_path / "empty"), "no-records", "it is empty"),
        (files(tmp_path / "texts", a__md=b"x"), "no-records", "it has a.md"),
        (files(tmp_path / "mixed", a__parquet=PARQUET, b__jsonl=LINES), "contradiction", "b.jsonl, a.parquet; expected one"),
        (files(tmp_path / "model", config__json=b"{}"), "bad-format", "the folder of a model, with config.json"),
        (tmp_path / "pipe", "unreadable", "it is a pipe; expected a regular file"),
        ("/dev/zero", "unreadable", "it is a device; expected a regular file"),
        (tmp_path / "absent.parquet", "file-not-found", "Try a path from the recipe's file"),
        (tmp_path / "x*.parquet", "file-not-found", f"{tmp_path} has empty, mixed, model, pipe, texts. Try **"),
        (tmp_path / "absent/*.parquet", "file-not-found", f"there is no folder {tmp_path}/absent"),
        ([str(tmp_path / "mixed/b.jsonl"), str(tmp_path / "absent.csv")], "file-not-found", "absent.csv"),
    ):
        (problem,) = found(path)
        assert problem[:2] == ("data.train.data_path", code) and message in problem[2]
    assert found(tmp_path / "mixed/*.parquet") == []


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch):
    path = files(tmp_path / "rows", a__jsonl=LINES) / "a.jsonl"

    opened = user_files.open_file

    def denied(asked):
        if str(asked) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(asked)

    monkeypatch.setattr(file_formats.user_files, "open_file", denied)  # root may run this test, whom no mode stops
    (problem,) = found(path)
    assert problem[:2] == ("data.train.data_path", "unreadable") and "Permission denied" in problem[2]


def test_files_whose_columns_differ_are_refused_by_their_own_record(tmp_path: Path):
    folder = files(tmp_path / "rows", a__jsonl=LINES, b__jsonl=b'{"input": "1", "answer": "2"}\n')
    for path in (folder, folder / "*.jsonl"):
        (problem,) = found(path)
        assert problem[1] == "bad-record" and f"{folder}/b.jsonl:1: has no 'output'" in problem[2]
    assert found(folder, "data.bad_records=drop") == []


@pytest.mark.parametrize("form", WRITERS)
def test_nested_columns_are_checked_in_every_format(tmp_path: Path, form: str):
    WRITERS[form](tmp_path / f"rows.{form}", [VERL] * 4)
    assert found(tmp_path / f"rows.{form}", *NAMED, *CHAT, algorithm="grpo") == []
    wrong = (NAMED[0], "data.train.output_key=reward_model.groundtruth", *CHAT)
    (problem,) = found(tmp_path / f"rows.{form}", *wrong, algorithm="grpo")
    assert "Try data.train.output_key=reward_model.ground_truth" in problem[2]


def test_a_saved_folder_is_checked_with_its_split(tmp_path: Path):
    splits = {"train": datasets.Dataset.from_list(ROWS), "other": datasets.Dataset.from_list([{"x": "1"}])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert found(tmp_path / "saved") == []
    assert found(tmp_path / "saved", "data.train.split=valid")[0][:2] == ("data.train.split", "not-a-choice")
    ((_, code, message),) = found(tmp_path / "saved", "data.train.split=other")
    assert code == "bad-record" and "other/data-00000-of-00001.arrow, row 0 (from 0): no column" in message


IMAGE = {"bytes": b"\x89PNG", "path": None}
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"image": IMAGE}, "image"),
        ({"pictures": [IMAGE]}, "pictures"),
        ({"images": ["a.png"]}, "images"),
        ({"audio": "a.wav"}, "audio"),
        ({"messages": PARTS}, "messages"),
    ],
)
def test_images_sound_and_video_are_refused_by_name(tmp_path: Path, row: dict, name: str):
    WRITERS["parquet"](tmp_path / "rows.parquet", [{**ROWS[0], **row}])
    (problem,) = found(tmp_path / "rows.parquet")
    assert f"row 0 (from 0): '{name}' has" in problem[2] and f"processor=MODULE.FUNCTION that removes '{name}'" in problem[2]


def test_empty_columns_of_images_are_text(tmp_path: Path):
    WRITERS["jsonl"](tmp_path / "rows.jsonl", [{**ROWS[0], "images": [], "image": None, "video": ""}])
    assert found(tmp_path / "rows.jsonl") == []


def test_images_of_a_data_set_in_the_hubs_cache_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub.download(tmp_path, "some/pictures", {"data/train-00000.parquet": [{**ROWS[0], "image": IMAGE}]})
    problems = input_files.problems(recipe_of(Path("some/pictures")))
    assert ["'image' has image data" in problem.message for problem in problems] == [True]
