"""Answers outlive a kill at any moment, exactly as they were."""

import errno
import json
import math

import pytest

from pipeline.evaluation import answers
from pipeline.evaluation.answers import AnswerLog, read_answers
from pipeline.evaluation.questions import Answer
from pipeline.files import storage
from pipeline.files.storage import RetryPolicy, StorageError
from pipeline.job.attempt import Superseded

LEFT = [Answer("b", 1, 0.1 + 0.2, {"unparsed": 0.0}), Answer("b", 0, 1.0), Answer("a", 10, 0.0), Answer("a", 9, -math.pi)]


@pytest.fixture
def log(tmp_path):
    log = AnswerLog(tmp_path, "task")
    for answer in LEFT:
        log.add(answer)
    return log


def again(log: AnswerLog) -> AnswerLog:
    return AnswerLog(log.path.parents[1], "task")


def test_a_restart_reads_what_was_kept_in_order(log):
    assert log.path.read_bytes().count(b"\n") == len(log) == log.added == log.scored == 4
    assert [(answer.question, answer.sample) for answer in log.all()] == [("a", 9), ("a", 10), ("b", 0), ("b", 1)]
    assert again(log).all() == log.all() == read_answers(log.path)
    assert again(log).added == 0
    assert log.has("a", 9) and not log.has("a", 0) and not log.has("c")


@pytest.mark.parametrize("torn", [1, 5, 40])
def test_a_torn_line_is_asked_again(log, torn):
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-torn])
    restarted = again(log)
    assert len(restarted) == 3 and not restarted.has("a", 9)
    restarted.add(LEFT[-1])
    assert log.path.read_bytes() == whole


def test_lines_that_a_power_cut_made_unreadable_are_asked_again(log, caplog):
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join([lines[0], b"\0" * 30 + b"\n", *lines[2:]]))
    restarted = again(log)
    assert not restarted.has("b", 0) and len(restarted) == 3 and "line 2 cannot be read" in caplog.text
    restarted.add(LEFT[1])
    assert again(log).all() == log.all() == read_answers(log.path)


def test_an_answer_without_a_score_is_asked_again_and_the_last_line_counts(log):
    log.add(Answer("c", 0, None, failure="the service is down"))
    assert not log.has("c") and len(log) == log.added == 5 and log.scored == 4
    restarted = again(log)
    assert not restarted.has("c") and restarted.all()[-1].failure
    restarted.add(Answer("c", 0, 1.0))
    assert restarted.has("c") and len(restarted) == 5 and restarted.scored == 1
    assert [answer.score for answer in again(log).all() if answer.question == "c"] == [1.0]


def test_an_answer_is_at_once_what_a_restart_reads(log):
    log.add(Answer("tuple", 0, 1.0, details={"pair": (1, 2), "by number": {3: 4}}))
    assert again(log).all() == log.all()
    assert log.all()[-1].details == {"pair": [1, 2], "by number": {"3": 4}}


@pytest.mark.parametrize("text", ["half of a pair \ud83d", "lines\u2028of\x85others\r", "\0", "答え", '"\\'])
def test_any_text_can_be_kept(log, text):
    log.add(Answer("z", 0, 1.0, text=text))
    assert json.loads(log.path.read_text("utf-8").split("\n")[-2])["text"] == text
    assert again(log).all()[-1].text == text


def test_a_full_disk_keeps_whole_lines(log, monkeypatch):
    whole, write = log.path.read_bytes(), storage.append

    def full(path, at, line, durable):
        write(path, at, line[:7], durable)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(answers, "append", full)
    with pytest.raises(StorageError, match="No space left"):
        log.add(Answer("c", 0, 1.0))
    assert not log.has("c") and again(log).all() == log.all()
    monkeypatch.setattr(answers, "append", write)
    log.add(Answer("c", 0, 1.0))
    assert log.path.read_bytes().startswith(whole) and again(log).has("c")


def test_a_later_attempt_has_claimed_the_folder(log):
    """It has more answers than this one knows of, which must stay."""
    later = again(log)
    later.add(Answer("later", 0, 1.0))

    def check():
        raise Superseded("by another attempt")

    superseded = AnswerLog(log.path.parents[1], "task", RetryPolicy(0.0, check))
    with pytest.raises(Superseded):
        superseded.add(Answer("c", 0, 1.0))
    assert again(log).all() == later.all()
