"""When an evaluation records progress, and when it leaves."""

import pytest

from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.evaluation_loop import CHECK_S, RECORD_S, Leaving, Supervisor
from pipeline.evaluation.questions import Answer
from pipeline.job.attempt import Attempt
from pipeline.job.deadline import MARGIN_S, Deadline
from pipeline.job.startup import Startup

HOUR = 3600.0


class Made:
    """A supervisor with clocks of its own."""

    def __init__(self, folder, monkeypatch):
        self.now, self.received = 1000.0, []
        self.log = AnswerLog(folder, "task")
        deadline = Deadline(1000.0, {"the allocation": 1000.0 + HOUR}, [], lambda: self.received, lambda: self.now)
        self.progress = folder / "progress"
        self.startup = Startup()
        monkeypatch.setattr("pipeline.evaluation.evaluation_loop.time.monotonic", lambda: self.now)
        self.look = Supervisor(Attempt(folder), deadline, [self.log], self.startup)

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.look()


@pytest.fixture
def made(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch)
    monkeypatch.setattr("pipeline.evaluation.answers.time.monotonic", lambda: made.now)
    return made


def test_progress_is_recorded_now_and_then(made):
    made.after(0)
    assert not made.progress.exists() and not made.startup._over.is_set()
    made.log.add(Answer("a", 0, 1.0))
    made.after(RECORD_S + 1)
    assert made.progress.read_text() == "1\n" and made.startup._over.is_set()
    made.log.add(Answer("b", 0, 1.0))
    made.after(CHECK_S + 1)
    assert made.progress.read_text() == "1\n"
    made.after(RECORD_S)
    assert made.progress.read_text() == "2\n"


def test_answers_without_a_score_are_no_progress(made):
    """Else a run whose environment is down would be requeued without end."""
    made.log.add(Answer("a", 0, None))
    made.after(RECORD_S + 1)
    assert not made.progress.exists()


def test_a_signal_ends_it_at_once(made):
    made.received.append("SIGUSR2")
    with pytest.raises(Leaving, match="SIGUSR2 came"):
        made.after(CHECK_S + 1)


def test_the_end_of_the_allocation_ends_it_once_there_is_an_answer(made):
    made.after(HOUR - MARGIN_S + 1)
    made.log.add(Answer("a", 0, None))
    with pytest.raises(Leaving, match=r"the allocation ends in \d+ s"):
        made.after(CHECK_S + 1)


def test_it_stays_while_there_is_time(made):
    made.log.add(Answer("a", 0, 1.0))
    made.after(HOUR - MARGIN_S - 1)
