"""Small files of runs: what a damaged one raises, and what an interrupted writer leaves."""

import os
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import pytest

from pipeline.config import RecipeError
from pipeline.files import small_files
from pipeline.files.small_files import LONGEST, Count, Moment
from tests.problems import named


class Entry(TypedDict):
    step: Count
    time: Moment
    note: NotRequired[str]


@dataclass(frozen=True)
class Record:
    step: int
    host: str | None = None


BAD = {
    "empty": b"",
    "zeros": bytes(100),
    "binary": os.urandom(64) + b"\xff",
    "cut": b'{"step": 1, "ti',
    "another type": b"[1]",
    "a text for a number": b'{"step": "1", "time": 1}',
    "a missing key": b'{"step": 1}',
    "a wrong type": b'{"step": "x", "time": 1}',
    "true for a number": b'{"step": true, "time": 1}',
    "infinity": b'{"step": 1, "time": 1e999}',
    "not a number": b'{"step": 1, "time": NaN}',
    "too large a number": b'{"step": 1' + b"0" * 5000 + b', "time": 1}',
    "nested": b"[" * 200_000,
    "long": b" " * (LONGEST + 1),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_damaged_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        small_files.read(path, Entry)
    assert named(caught.value.problems) == {("run", "unreadable")}
    assert str(path) in str(caught.value)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path / "folder", "/dev/zero"):
        with pytest.raises(OSError) as caught:
            small_files.read(path, Entry)
        assert caught.value.filename == str(path)


def test_a_missing_file_is_none(tmp_path):
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for name in ("missing", "nowhere"):
        assert small_files.read(tmp_path / name, Entry) is None
        assert list(small_files.lines(tmp_path / name, Entry)) == []


def test_values_keep_the_keys_of_later_versions_and_records_their_own(tmp_path):
    path = tmp_path / "file.json"
    small_files.write(path, {"step": 3, "time": 1.5, "new": [1]})
    assert small_files.read(path, Entry) == {"step": 3, "time": 1.5, "new": [1]}
    assert small_files.read(path, Record) == Record(3)


def test_lines_leave_out_an_interrupted_one_and_the_writer_replaces_it(tmp_path):
    path = tmp_path / "file.jsonl"
    for step in (1, 2):
        small_files.append(path, {"step": step, "time": 0})
    with open(path, "a") as file:
        file.write('{"step": 3, "ti')
    assert [each["step"] for each in small_files.lines(path, Entry)] == [1, 2]
    small_files.append(path, {"step": 4, "time": 0, "note": "x" * 100_000})
    small_files.append(path, {"step": 5, "time": 0})
    assert [each["step"] for each in small_files.lines(path, Entry)] == [1, 2, 4, 5]


def test_a_damaged_line_is_refused_with_its_number(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"step": 1, "time": 0}\n\0\0\n')
    with pytest.raises(RecipeError, match=r"file\.jsonl:2: "):
        list(small_files.lines(path, Entry))
    path.write_bytes(b"x" * (LONGEST + 1))
    with pytest.raises(RecipeError, match=r"file\.jsonl: "):
        list(small_files.lines(path, Entry))
