"""Define what `kind: llm_judge` asks a judge for, and how the verdict in a reply becomes a reward from 0 to 1.

    score      a number on `scale`; reward 0 for its first end, 1 for its last
    yes_no     yes (1) or no (0)
    rubric     a number on `scale` for each of `criteria`; the reward is their weighted mean
    pairwise   which is better, the answer or a reference: 1 for the answer, 0.5 for a tie; the mean of both orders

With a second prompt the judge is asked twice, and the worse reward counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field

from pipeline.environments.judge_prompts import JudgePrompt
from pipeline.environments.verdicts import PREFERENCES, read_score, read_scores, read_verdict
from pipeline.recipe.values import MISSING, Check, Float, Text

if TYPE_CHECKING:
    from pipeline.environments.llm_judge import LLMJudgeArguments

RatingName = Literal["score", "yes_no", "rubric", "pairwise"]
_TASK = """Judge whether the response answers the question as the reference does.

Question: {question}

Reference: {answer}

Response: {response}

"""
_REASONS = "First give your reasons in a few sentences. Then write"
PROMPTS: dict[str, str] = {
    "score": f'{_TASK}Reply with one line, "Score: N", where N is from 0 (wrong) to 10 (right).',
    "yes_no": f'{_TASK}{_REASONS} one last line of the form "Verdict: X", where X is yes or no.',
    "rubric": f"""{_TASK}Rate the response by each of these criteria:

{{criteria}}

{_REASONS} one last line for each criterion, of the form "NAME: N", where N is from {{lowest}} to {{highest}} (best).""",
}
"""Rating -> default prompt. That of pairwise is recipes/prompts/judge_comparison.txt."""
PLACEHOLDERS = {"pairwise": ("answer_a", "answer_b"), "rubric": ("response", "criteria")}
"""Rating -> placeholders that its prompt needs; otherwise `response`."""
YES_NO = {"yes": 1.0, "no": 0.0}
PREFERRED = {"A": 1.0, "tie": 0.5, "B": 0.0}
"""Preference -> reward of the answer at the first place."""


@dataclass
class Criterion:
    """A criterion of a rubric."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[Text, Check(lambda name: _name_error(name))] = MISSING
    """Name, with which the judge's line begins and which its metric has."""
    description: Text = ""
    """What the judge reads about it."""
    weight: Annotated[Float, Field(gt=0, le=1e15)] = 1.0
    """Weight in the mean."""


def _name_error(name: str) -> str | None:
    fits = re.fullmatch(r"[A-Za-z][A-Za-z0-9_ -]*", name)
    return None if fits else f"got {name!a}; expected a letter, then letters, digits, spaces and any of _ -"


@dataclass(frozen=True, slots=True)
class JudgeVerdict:
    """A judge's verdict on an answer."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AskedForm:
    """A prompt that a judge is asked, and how its reply is read."""

    prompt: JudgePrompt
    response: str  # placeholder of the policy's answer
    reference: str  # placeholder of the reference text; "" if it is only the placeholder `answer`
    read: Callable[[str], JudgeVerdict | None]
    """Return the verdict of a reply, None if it has none. Raises ValueError for a number outside of the scale."""


class Rating:
    """A form of rating with its prompts."""

    def __init__(self, arguments: LLMJudgeArguments) -> None:
        """Read the forms that the kwargs describe."""
        self._scale, self._criteria = (arguments.scale[0], arguments.scale[1]), arguments.criteria
        self._pattern = re.compile(arguments.score_pattern)
        self._is_pairwise = arguments.rating == "pairwise"
        if self._is_pairwise:
            prompt = JudgePrompt.of_text(arguments.prompt, "judge_comparison.txt")
            self.forms = [
                AskedForm(prompt, "answer_a", "answer_b", lambda reply: _preferred(reply, "A")),
                AskedForm(prompt, "answer_b", "answer_a", lambda reply: _preferred(reply, "B")),
            ]
            return
        read = {"score": self._score, "yes_no": _yes_no, "rubric": self._rubric}[arguments.rating]
        texts = [arguments.prompt or PROMPTS[arguments.rating], arguments.second_prompt]
        self.forms = [AskedForm(JudgePrompt(text), "response", "", read) for text in texts if text is not None]

    @property
    def values(self) -> dict[str, str]:
        """Placeholder -> text, for those that describe a rubric."""
        if not self._criteria:
            return {}
        lines = [f"- {one.name}{f': {one.description}' if one.description else ''}" for one in self._criteria]
        lowest, highest = self._scale
        return {"criteria": "\n".join(lines), "lowest": f"{lowest:g}", "highest": f"{highest:g}"}

    def combined(self, verdicts: Sequence[JudgeVerdict]) -> JudgeVerdict:
        """Return the verdict that counts: of both orders the mean, of two prompts the worse."""
        rewards = [verdict.reward for verdict in verdicts]
        disagreement = {"disagreement": max(rewards) - min(rewards)} if len(rewards) > 1 else {}
        if self._is_pairwise:
            return JudgeVerdict(sum(rewards) / len(rewards), disagreement)
        worst = verdicts[rewards.index(min(rewards))]
        return JudgeVerdict(worst.reward, {**worst.metrics, **disagreement})

    def _score(self, reply: str) -> JudgeVerdict | None:
        score = read_score(reply, self._pattern)
        return None if score is None else JudgeVerdict(self._share(score, "the score"), {"score": score})

    def _rubric(self, reply: str) -> JudgeVerdict | None:
        scores = read_scores(reply, [one.name for one in self._criteria])
        if scores is None:
            return None
        total = sum(one.weight for one in self._criteria)
        reward = sum(one.weight * self._share(scores[one.name], one.name) for one in self._criteria) / total
        return JudgeVerdict(reward, scores)

    def _share(self, score: float, what: str) -> float:
        """Return a score's place on the scale, from 0 to 1. Raises ValueError for one outside of it."""
        low, high = self._scale
        if not min(low, high) <= score <= max(low, high):
            raise ValueError(f"got {what} {score:g}; expected {low:g} to {high:g}")
        return (score - low) / (high - low)


def _yes_no(reply: str) -> JudgeVerdict | None:
    reward = read_verdict(reply, "Verdict", lambda text: YES_NO.get(text.lower()))
    return None if reward is None else JudgeVerdict(reward)


def _preferred(reply: str, place: str) -> JudgeVerdict | None:
    """Return the verdict on the answer at a place: A or B."""
    preference = read_verdict(reply, "Verdict", lambda text: PREFERENCES.get(text.lower()))
    if preference is None:
        return None
    reward = PREFERRED[preference]
    return JudgeVerdict(reward if place == "A" else 1 - reward)
