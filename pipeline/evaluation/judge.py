"""Ask a judge, on rank 0: the interface of judges for all judged tasks, and the rule for replies without a verdict.

A `Judge` is an endpoint (`judge_endpoint.py`) or engines of the job (`judge_engines.py`). It takes requests and returns the
replies in any order. `Judging` asks a judge for the verdicts of a task's cases, while the policy's engines work on.

If a reply has no readable verdict, the reply is counted and the prompt is asked again with another seed, `tries` times in all.
The answer itself may keep the judge from giving a verdict. So if all tries fail, the same prompt is asked with an empty answer.
If that gets a verdict, the answer is judged once more, and is to blame if that try fails too. Otherwise the judge is to blame,
and the answer stays unjudged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.config import Problem, RecipeError
from pipeline.environments.verdicts import CUT


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """A prompt for the judge."""

    id: str  # unique among the open requests
    task: str  # name of the task
    index: int  # unique in the task; with `attempt` it determines the seed
    attempt: int  # 0: the first time this prompt is asked
    prompt: str


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The judge's reply to a request."""

    id: str  # the request's
    text: str = ""
    finish: str = "stop"
    failure: str = ""  # why there is no reply
    busy: bool = False  # there is no reply, and no answer can be the cause


class Judge(Protocol):
    """A judge that works on several requests at once, while the policy's engines work too."""

    def submit(self, requests: Sequence[JudgeRequest]) -> None:
        """Send requests to the judge without waiting for the replies."""

    def take(self, wait: bool) -> list[JudgeReply]:
        """Return the replies that have arrived. With `wait`, wait for at least one reply if a request is open."""
        ...

    def close(self) -> None:
        """Release connections."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt for which a verdict is wanted."""

    id: str  # unique in its task
    index: int  # place in the task, part of the seed
    prompt: str
    blank: str  # the same prompt with empty answers of the evaluated model
    read: Callable[[str], Any]  # returns the verdict of a reply, None if it has none


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a case: its verdict, or why it has none."""

    case: Case
    verdict: Any = None  # None: there is none
    at_fault: bool = False  # there is none because of the answer
    failure: str = ""  # why there is none
    unreadable: int = 0  # replies without a readable verdict
    replies: tuple[str, ...] = ()  # of the judge, the last one with the verdict

    def record(self) -> dict[str, Any]:
        """Return the prompt, the replies, the verdict and any failure, to be kept in the answer's details."""
        about = {"failure": self.failure} if self.failure else {}
        return {"prompt": self.case.prompt, "replies": list(self.replies), "verdict": self.verdict, **about}


@dataclass(slots=True)
class _OpenCase:
    case: Case
    attempts: int = 0  # of the real prompt
    stage: str = "first"  # "first" tries, "blank" answers, "last" try
    failure: str = ""
    unreadable: int = 0
    replies: list[str] = field(default_factory=list)


class Judging:
    """Gets the verdicts of a task's cases from a judge."""

    def __init__(self, judge: Judge, task: str, tries: int) -> None:
        """Bind to a judge. tries: how often a case's prompt is asked before an empty answer is tried."""
        self._judge, self._task, self._tries = judge, task, tries
        self._open: dict[str, _OpenCase] = {}

    @property
    def pending(self) -> int:
        """Number of cases that wait for their result."""
        return len(self._open)

    def submit(self, cases: Sequence[Case]) -> None:
        """Ask the judge about cases. Raises ValueError for a case that is open already."""
        for case in cases:
            if case.id in self._open:
                raise ValueError(f"case {case.id} is open already")
            self._open[case.id] = _OpenCase(case)
        self._judge.submit([self._request(self._open[case.id]) for case in cases])

    def take(self, wait: bool) -> list[Judgement]:
        """Return the results of the cases that have ended. With `wait`, wait for at least one if a case is open."""
        judgements: list[Judgement] = []
        while self._open:
            retries: list[JudgeRequest] = []
            replies = self._judge.take(wait and not judgements)
            if not replies:
                break
            for reply in replies:
                open_case = self._open[reply.id.rpartition("/")[0]]
                if judgement := self._handle_reply(open_case, reply):
                    del self._open[open_case.case.id]
                    judgements.append(judgement)
                else:
                    retries.append(self._request(open_case))
            if retries:
                self._judge.submit(retries)
        return judgements

    def _request(self, open_case: _OpenCase) -> JudgeRequest:
        case, blank = open_case.case, open_case.stage == "blank"
        attempt = open_case.attempts
        name = f"{case.id}/{'blank' if blank else attempt}"
        return JudgeRequest(name, self._task, case.index, attempt, case.blank if blank else case.prompt)

    def _handle_reply(self, open_case: _OpenCase, reply: JudgeReply) -> Judgement | None:
        """Handle a reply. Return the result of its case, or None if the judge must be asked again."""
        case = open_case.case
        verdict = None if reply.failure or reply.finish == CUT else case.read(reply.text)
        if open_case.stage == "blank":
            if verdict is None:  # the judge judges nothing
                return self._end(open_case, at_fault=False)
            open_case.stage = "last"
            return None
        open_case.attempts += 1
        if not reply.failure:
            open_case.replies.append(reply.text)
        if verdict is not None:
            return Judgement(case, verdict, unreadable=open_case.unreadable, replies=tuple(open_case.replies))
        open_case.unreadable += not reply.failure
        cut = " that was cut" if reply.finish == CUT else ""
        open_case.failure = reply.failure or f"a reply{cut} without a verdict: {reply.text[-SHOWN:]!r}"
        if reply.busy:
            return self._end(open_case, at_fault=False)
        if open_case.stage == "last":
            return self._end(open_case, at_fault=True)
        if open_case.attempts >= self._tries:
            open_case.stage = "blank"
        return None

    def _end(self, open_case: _OpenCase, at_fault: bool) -> Judgement:
        count, end = open_case.attempts, "; the judge gives a verdict on an empty answer" if at_fault else ""
        failure = f"no verdict after {count} tries; the last: {open_case.failure}{end}"
        return Judgement(open_case.case, None, at_fault, failure, open_case.unreadable, tuple(open_case.replies))


SHOWN = 300
"""Number of a reply's last characters that a failure shows."""


def require_judge(judge: Judge | None, task: str) -> Judge:
    """Return `judge`. Raises RecipeError if it is None because the recipe names no judge."""
    if judge is None:
        message = f"got neither env_name nor model_name; expected one of them, since evaluate.tasks.{task} needs a judge"
        raise RecipeError(Problem("evaluate.judge", "missing-value", message))
    return judge
