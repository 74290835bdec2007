"""The common part of tasks whose answers a judge scores. It samples answers while the judge scores earlier ones.

An answer is kept twice: without a score as soon as it is sampled, so that a restart only has to judge it, and again with its
score. The judge's prompts and replies are in the answer's details.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe
from pipeline.coordination.dispatch import RolloutSpec
from pipeline.data.stop_strings import answer_text, rollout_text
from pipeline.environments.judge_prompts import JudgePrompt
from pipeline.evaluation import prompts, task_data
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.judge import Case, Judgement, Judging, require_judge
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.sampled import sampling
from pipeline.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIES = 3
"""Most tries of a prompt, with different seeds, until a reply has a verdict."""
TEXTS = "texts"
"""Key of `Answer.details` for the texts to judge, one for each turn of the model."""


@dataclass(frozen=True, slots=True)
class AskedVerdict:
    """A verdict that a judge is asked for about an answer."""

    name: str  # unique for the answer
    prompt: str
    blank: str  # with an empty answer of the evaluated model
    read: Callable[[str], Any]


@dataclass(slots=True)
class _OpenAnswer:
    question: Question
    answer: Answer
    waiting: set[str]
    judgements: dict[str, Judgement] = field(default_factory=dict)


class JudgedTask:
    """A task whose answers `evaluate.judge` judges."""

    prompt_file: ClassVar[str]
    """Name of the default prompt of this kind of task, in recipes/prompts/."""
    placeholders: ClassVar[tuple[str, ...]]
    """Placeholders that a judge's prompt must have."""
    verdicts_per_answer: ClassVar[int] = 1

    def __init__(self, name: str, config: TaskConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.config = name, config
        self._tokenizer = tokenizer
        self._data = task_data.read(name, config)
        self._prompts, self.warnings = prompts.encode(
            name, replace(config, env_name=None), self._data, recipe.policy, tokenizer
        )
        self._questions = {question.index: question for question in self._data.questions}
        self.dropped = self._data.dropped.count
        key = f"evaluate.tasks.{name}.judge_prompt_file"
        self._judge_prompt = JudgePrompt.of_file(key, config.judge_prompt_file, self.prompt_file, self.placeholders)

    @abstractmethod
    def verdicts(self, question: Question, texts: Sequence[str]) -> list[AskedVerdict]:
        """Return the verdicts to ask for about the texts of an answer, at most `verdicts_per_answer`."""
        raise NotImplementedError

    @abstractmethod
    def grade(self, question: Question, texts: Sequence[str], verdicts: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return (score, metrics) of an answer. verdicts: name -> verdict; None if the answer kept the judge from giving it."""
        raise NotImplementedError

    @abstractmethod
    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """See `pipeline.evaluation.task.Task`."""
        raise NotImplementedError

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Sample the missing answers, and have all unjudged answers judged."""
        judging = Judging(require_judge(engines.judge, self.name), self.name, TRIES)
        open_answers: dict[str, _OpenAnswer] = {}

        def judge(question: Question, answer: Answer) -> None:
            cases = self._cases(question, answer)
            waiting = _OpenAnswer(question, answer, {case.id for case in cases})
            open_answers[f"{question.id}/{answer.sample}"] = waiting
            judging.submit(cases)

        def keep(wait: bool) -> None:
            for judgement in judging.take(wait):
                name, _, verdict = judgement.case.id.rpartition("/")
                waiting = open_answers[name]
                waiting.judgements[verdict] = judgement
                waiting.waiting.discard(judgement.case.id)
                if not waiting.waiting:
                    answers.add(self._complete(open_answers.pop(name)))

        sampled = {(answer.question, answer.sample): answer for answer in answers.all() if answer.details.get(TEXTS)}
        by_id = {question.id: question for question in self._data.questions}
        for (name, sample), answer in sampled.items():
            if name in by_id and not answers.has(name, sample):
                judge(by_id[name], answer)
        for question, answer in self.sample(engines, sampled):
            answers.add(answer)
            if not answer.failure:
                judge(question, answer)
            keep(wait=False)
        while judging.pending:
            engines.check()
            keep(wait=True)

    def sample(self, engines: Engines, kept: Mapping[tuple[str, int], Answer]) -> Iterator[tuple[Question, Answer]]:
        """Sample the missing answers, and yield (question, answer without a score) as they arrive.

        kept: (question id, sample) -> answer that is not sampled again.
        """
        samples = range(self.config.num_samples)
        samples_kept = {
            index: {sample for sample in samples if (question.id, sample) in kept}
            for index, question in self._questions.items()
        }
        missing = [prompt for prompt in self._prompts if len(samples_kept[prompt.index]) < len(samples)]
        spec = RolloutSpec(self.name, len(samples), sampling(self.config, self._tokenizer))
        for group in engines.generate(missing, spec, self.config.seed, skip=samples_kept):
            question = self._questions[group.prompt.index]
            text = str(self._tokenizer.decode(group.prompt.tokens))
            for sample in sorted(set(samples) - samples_kept[question.index]):
                yield question, self._new_answer(question, sample, text, group.rollouts[sample])

    def _new_answer(self, question: Question, sample: int, prompt: str, rollout: Rollout) -> Answer:
        text, answer = rollout_text(self._tokenizer, rollout), answer_text(self._tokenizer, rollout)
        return Answer(
            question.id,
            sample,
            None,
            {},
            prompt,
            text,
            rollout.drawn_tokens,
            rollout.finish,
            rollout.failure,
            question.group,
            {TEXTS: [] if rollout.failure else [self.without_thinking(answer)]},
        )

    def without_thinking(self, text: str) -> str:
        """Return the text without the model's thinking, which is not judged. Return "" if the thinking does not end."""
        end = self.config.thinking_end
        begin = end.replace("</", "<")
        _, separator, answer = text.rpartition(end)
        if separator:
            return answer.strip()
        return "" if begin != end and begin in text else text.strip()

    def _cases(self, question: Question, answer: Answer) -> list[Case]:
        first = (question.index * self.config.num_samples + answer.sample) * self.verdicts_per_answer
        return [
            Case(f"{question.id}/{answer.sample}/{verdict.name}", first + number, verdict.prompt, verdict.blank, verdict.read)
            for number, verdict in enumerate(self.verdicts(question, answer.details[TEXTS]))
        ]

    def _complete(self, open_answer: _OpenAnswer) -> Answer:
        answer, judgements = open_answer.answer, open_answer.judgements
        details = {**answer.details, "judge": {name: judgements[name].record() for name in sorted(judgements)}}
        unreadable = {"unreadable_verdicts": float(sum(judgement.unreadable for judgement in judgements.values()))}
        failures = [judgement.failure for judgement in judgements.values() if judgement.failure]
        failure = "; ".join(failures)
        if any(judgement.verdict is None and not judgement.at_fault for judgement in judgements.values()):
            return replace(answer, metrics=unreadable, failure=failure, details=details)
        verdicts = {name: judgement.verdict for name, judgement in sorted(judgements.items())}
        score, metrics = self.grade(open_answer.question, answer.details[TEXTS], verdicts)
        return replace(answer, score=score, metrics={**metrics, **unreadable}, failure=failure, details=details)


def per_question(answers: Sequence[Answer], value: Callable[[Answer], float | None]) -> dict[str, list[float]]:
    """Return question id -> the metric's values of its judged answers. value: a function of an answer; None is left out."""
    values: dict[str, list[float]] = {}
    for answer in answers:
        if answer.score is not None and (number := value(answer)) is not None:
            values.setdefault(answer.question, []).append(number)
    return values
