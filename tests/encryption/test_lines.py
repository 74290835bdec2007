"""Encrypted answers of an evaluation: a killed one goes on, a line cannot be moved or changed, and files stay JSON lines."""

import json

import pytest

pytest.importorskip("cryptography")

from pipeline.evaluation.answers import AnswerLog, encode_answers, read_answers
from pipeline.evaluation.questions import Answer
from pipeline.files.stored_files import decrypt_line, encrypt_line
from tests.encryption.keys import random_key
from tests.encryption.plain import holding
from tests.problems import refused

DAMAGED, WRONG = ("run", "damaged"), ("checkpointing.encryption", "wrong-key")


def answer(question: str, text: str = "Eight apples") -> Answer:
    return Answer(question=question, sample=0, text=text, score=1.0)


def test_a_log_goes_on_where_it_was_killed(tmp_path):
    key = random_key()
    log = AnswerLog(tmp_path, "sums", key=key)
    for question in ("q1", "q2"):
        log.add(answer(question))
    with log.path.open("ab") as file:
        file.write(b'{"encrypted": "ab')  # killed
    log = AnswerLog(tmp_path, "sums", key=key)
    assert len(log) == 2 and log.has("q2") and not log.has("q3")
    log.add(answer("q3", "Nine apples"))
    assert [one.text for one in read_answers(log.path, lambda: key)] == ["Eight apples", "Eight apples", "Nine apples"]
    assert holding(tmp_path, [b"apples", b"question", b'"q1"']) == []
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert {line["encrypted"] for line in lines} == {key.fingerprint} and len(lines) == 3
    for wrong in (random_key(), None):
        with refused(WRONG) as error:
            AnswerLog(tmp_path, "sums", key=wrong)
        assert key.fingerprint in str(error.value)


def test_a_key_that_only_reads_goes_on_in_plain(tmp_path):
    key = random_key()
    AnswerLog(tmp_path, "sums", key=key).add(answer("q1"))
    AnswerLog(tmp_path, "sums", key=key, encrypts=False).add(answer("q2"))
    assert [one.question for one in read_answers(tmp_path / "answers/sums.jsonl", lambda: key)] == ["q1", "q2"]
    assert b'"q2"' in (tmp_path / "answers/sums.jsonl").read_bytes()


def test_lines_that_are_changed_moved_or_of_another_file_are_refused(tmp_path):
    key, path = random_key(), tmp_path / "sums.jsonl"
    line = encrypt_line(b"text\n", key, "sums.jsonl", 40)
    assert decrypt_line(line, lambda: key, path, 40) == b"text\n"
    assert decrypt_line(b"plain\n", lambda: pytest.fail("no key is needed"), path, 0) == b"plain\n"
    at = len(line) - 20
    changed = line[:at] + (b"A" if line[at : at + 1] != b"A" else b"B") + line[at + 1 :]
    for content, where, begin in ((changed, path, 40), (line, path, 41), (line, tmp_path / "other.jsonl", 40)):
        with refused(DAMAGED):
            decrypt_line(content, lambda: key, where, begin)
    with refused(DAMAGED):
        decrypt_line(b'{"encrypted": "ab"}\n', lambda: key, path, 0)


def test_a_whole_file_of_answers_reads_as_one_that_grew(tmp_path):
    key, answers = random_key(), [answer(f"q{i}") for i in range(3)]
    for given in (key, None):
        (tmp_path / "all.jsonl").write_bytes(encode_answers(answers, "all.jsonl", given))
        assert read_answers(tmp_path / "all.jsonl", lambda: key) == answers
