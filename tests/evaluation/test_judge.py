"""When a judge is asked again, and whom a missing verdict is blamed on."""

import pytest

from pipeline.environments.verdicts import read_preference
from pipeline.evaluation.judge import Case, Judgement, JudgeReply, Judging
from tests.evaluation.judges import SaidJudge


def judged(*said, blank="Verdict: B", tries=3) -> tuple[Judgement, SaidJudge]:
    """Return the end of a case whose attempts get these replies, the last one for all that follow."""
    judge = SaidJudge(lambda request: blank if request.prompt == "blank" else said[min(request.attempt, len(said) - 1)])
    judging = Judging(judge, "task", tries)
    judging.submit([Case("q/0", 7, "real", "blank", read_preference)])
    ended = []
    while judging.pending:
        ended += judging.take(wait=True)
    (judgement,) = ended
    return judgement, judge


CUT = JudgeReply("", "Verdict: A", finish="length")
BUSY = JudgeReply("", failure="status 503", busy=True)
REFUSED = JudgeReply("", failure="status 400")


@pytest.mark.parametrize(
    ("said", "blank", "verdict", "at_fault", "unreadable", "prompts"),
    [
        (["Verdict: A"], "", "A", False, 0, ["real"]),
        (["hm", "Verdict: B"], "", "B", False, 1, ["real"] * 2),
        (["hm", "hm", "Verdict: tie"], "", "tie", False, 2, ["real"] * 3),
        ([CUT, "Verdict: A"], "", "A", False, 1, ["real"] * 2),
        ([REFUSED, "Verdict: A"], "", "A", False, 0, ["real"] * 2),
        (["hm"], "Verdict: B", None, True, 4, ["real"] * 3 + ["blank", "real"]),
        (["hm"], "hm", None, False, 3, ["real"] * 3 + ["blank"]),
        (["hm"], CUT, None, False, 3, ["real"] * 3 + ["blank"]),
        (["hm"], BUSY, None, False, 3, ["real"] * 3 + ["blank"]),
        (["hm", "hm", "hm", "Verdict: A"], "Verdict: B", "A", False, 3, ["real"] * 3 + ["blank", "real"]),
        ([BUSY], "Verdict: B", None, False, 0, ["real"]),
        (["hm", BUSY], "Verdict: B", None, False, 1, ["real"] * 2),
        (["hm", "hm", "hm", BUSY], "Verdict: B", None, False, 3, ["real"] * 3 + ["blank", "real"]),
        ([REFUSED], "Verdict: B", None, True, 0, ["real"] * 3 + ["blank", "real"]),
        ([REFUSED], REFUSED, None, False, 0, ["real"] * 3 + ["blank"]),
        ([CUT], "Verdict: B", None, True, 4, ["real"] * 3 + ["blank", "real"]),
    ],
)
def test_blame(said, blank, verdict, at_fault, unreadable, prompts):
    judgement, judge = judged(*said, blank=blank)
    assert (judgement.verdict, judgement.at_fault, judgement.unreadable) == (verdict, at_fault, unreadable)
    assert [request.prompt for request in judge.asked] == prompts
    assert bool(judgement.failure) == (verdict is None)


def test_attempts_differ_in_seed_only():
    _, judge = judged("hm", "hm", "Verdict: A")
    assert [(one.index, one.attempt, one.task) for one in judge.asked] == [(7, 0, "task"), (7, 1, "task"), (7, 2, "task")]


def test_one_try():
    judgement, judge = judged("hm", blank="hm", tries=1)
    assert len(judge.asked) == 2 and "after 1 tries" in judgement.failure


def test_everything_that_was_said_is_kept():
    judgement, _ = judged("hm", "Verdict: A")
    assert judgement.record() == {"prompt": "real", "replies": ["hm", "Verdict: A"], "verdict": "A"}


def test_many_cases_end_in_any_order():
    judge = SaidJudge(lambda request: "Verdict: A" if request.index % 3 or request.attempt else "hm")
    judging = Judging(judge, "task", 2)
    judging.submit([Case(f"q/{i}/ab", i, f"{i}", "", read_preference) for i in range(9)])
    with pytest.raises(ValueError, match="is open already"):
        judging.submit([Case("q/1/ab", 1, "1", "", read_preference)])
    ended = []
    while judging.pending:
        ended += judging.take(wait=False)
    assert sorted(judgement.case.index for judgement in ended) == list(range(9))
    assert judging.take(wait=True) == []
