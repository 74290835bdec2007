"""Tasks of several turns in which a judge rates the model's answer to each turn from 1 to 10, as in MT-Bench.

The second turn is asked once the first is answered. Its prompt is the conversation so far, which the chat template renders anew
without the model's thinking. The judge rates each turn alone: it sees the conversation up to that turn, and the turn's
reference if there is one. An answer that keeps the judge from giving a rating gets the lowest rating.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe
from pipeline.coordination.dispatch import RolloutSpec
from pipeline.environments.verdicts import HIGHEST, LOWEST, read_rating
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.judged import TEXTS, AskedVerdict, JudgedTask, per_question
from pipeline.evaluation.prompts import PromptEncoder
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.sampled import sampling
from pipeline.evaluation.statistics import Scale
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TURNS = 8


class RatingTask(JudgedTask):
    """A task of kind `multi_turn_rating`.

    `Question.task` has `turns`, the user's texts, and `references`, a text for each turn, "" for a turn without a reference.
    `references` may be shorter. Metrics: `rating`, the mean over a question's turns; `turn_1`, `turn_2`, ..., of one turn each.
    """

    prompt_file: ClassVar[str] = "judge_rating.txt"
    placeholders: ClassVar[tuple[str, ...]] = ("conversation", "reference")
    verdicts_per_answer: ClassVar[int] = MOST_TURNS
    scales: ClassVar[Mapping[str, Scale]] = dict.fromkeys(
        ("rating", *(f"turn_{turn}" for turn in range(1, MOST_TURNS + 1))), Scale(LOWEST, HIGHEST)
    )

    def __init__(self, name: str, config: TaskConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(name, config, recipe, tokenizer)
        if not config.apply_chat_template:
            message = "got false; expected true, since a conversation of several turns needs a chat template"
            raise RecipeError(Problem(f"evaluate.tasks.{name}.apply_chat_template", "contradiction", message))
        for question in self._data.questions:
            if (turns := len(question.task["turns"])) > MOST_TURNS:
                message = f"question {question.id}: has {turns} turns; expected at most {MOST_TURNS}"
                raise RecipeError(Problem(f"evaluate.tasks.{name}.data", "bad-record", message))
        self._encoder = PromptEncoder(name, replace(config, env_name=None), recipe.policy.tokenizer, tokenizer)
        self._room = recipe.policy.generation.vllm_cfg.max_model_len

    @override
    def sample(self, engines: Engines, kept: Mapping[tuple[str, int], Answer]) -> Iterator[tuple[Question, Answer]]:
        waiting: dict[int, tuple[Question, Answer]] = {}
        for question, answer in super().sample(engines, kept):
            if answer.failure or len(question.task["turns"]) == 1:
                yield question, answer
            else:
                waiting[question.index * self.config.num_samples + answer.sample] = question, answer
        turn = 1
        while waiting:
            prompts = {index: self._next(index, *pair) for index, pair in waiting.items()}
            for index in [index for index, prompt in prompts.items() if len(prompt.tokens) >= self._room]:
                question, answer = waiting.pop(index)  # no room for another answer: the rest is empty
                del prompts[index]
                texts = answer.details[TEXTS]
                blanks = [""] * (len(question.task["turns"]) - len(texts))
                yield question, replace(answer, finish="length", details={TEXTS: [*texts, *blanks]})
            spec = RolloutSpec(f"{self.name}/turn {turn + 1}", 1, sampling(self.config, self._tokenizer))
            following: dict[int, tuple[Question, Answer]] = {}
            for group in engines.generate(list(prompts.values()), spec, self.config.seed):
                question, answer = waiting.pop(group.prompt.index)
                prompt_text = str(self._tokenizer.decode(group.prompt.tokens))
                answer = _join_turns(answer, self._new_answer(question, answer.sample, prompt_text, group.rollouts[0]))
                if answer.failure or len(answer.details[TEXTS]) == len(question.task["turns"]):
                    yield question, answer
                else:
                    following[group.prompt.index] = question, answer
            waiting, turn = following, turn + 1

    def _next(self, index: int, question: Question, answer: Answer) -> Prompt:
        """Return the prompt of the first turn that `answer` has not answered. index: the prompt's index."""
        texts: list[str] = answer.details[TEXTS]
        messages = _conversation(question, texts)
        messages.append({"role": "user", "content": question.task["turns"][len(texts)]})
        return replace(self._encoder.prompt(replace(question, prompt=messages)), index=index)

    @override
    def verdicts(self, question: Question, texts: Sequence[str]) -> list[AskedVerdict]:
        prompts = [
            [self._render(question, texts[:turn], blank) for blank in (False, True)] for turn in range(1, len(texts) + 1)
        ]
        return [AskedVerdict(f"turn_{turn}", real, blank, read_rating) for turn, (real, blank) in enumerate(prompts, 1)]

    def _render(self, question: Question, texts: Sequence[str], blank: bool) -> str:
        turn = len(texts)
        conversation: dict[str, str] = {}
        for number, (user, reply) in enumerate(zip(question.task["turns"], texts, strict=False), 1):
            conversation[f"user_{number}"], conversation[f"assistant_{number}"] = user, "" if blank else reply
        references = question.task.get("references") or []
        reference = {"reference": references[turn - 1]} if turn <= len(references) and references[turn - 1] else {}
        return self._judge_prompt.fill({"conversation": conversation, "reference": reference})

    @override
    def grade(self, question: Question, texts: Sequence[str], verdicts: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        ratings = {name: LOWEST if verdict is None else verdict for name, verdict in verdicts.items()}
        return sum(ratings.values()) / len(ratings), ratings

    @override
    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        judged = [answer for answer in answers if answer.score is not None]
        names = sorted({name for answer in judged for name in answer.metrics if name.startswith("turn_")})
        metrics: dict[str, PerQuestion] = {"rating": per_question(judged, lambda answer: answer.score)}
        return metrics | {name: per_question(judged, lambda answer, name=name: answer.metrics.get(name)) for name in names}


def _conversation(question: Question, texts: Sequence[str]) -> list[dict[str, str]]:
    """Return the answered turns as messages of the user and the assistant. texts: the model's answers."""
    messages: list[dict[str, str]] = []
    for user, reply in zip(question.task["turns"], texts, strict=False):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return messages


def _join_turns(before: Answer, after: Answer) -> Answer:
    """Return the answer `before` joined with `after`, the answer to the next turn."""
    texts = [*before.details[TEXTS], *after.details[TEXTS]]
    return replace(
        after,
        text=f"{before.text}\n\n{after.text}",
        tokens=before.tokens + after.tokens,
        finish="length" if "length" in (before.finish, after.finish) else after.finish,
        details={TEXTS: texts},
    )
