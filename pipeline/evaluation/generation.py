"""Tasks whose answers are sampled, and scored by an environment, as in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe
from pipeline.evaluation import data, prompts
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.base import Answer, PerQuestion, Question
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.statistics import pass_at
from pipeline.rollout.dispatch import RolloutSpec
from pipeline.types import Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GenerationTask:
    """A task of kind `generate`. The score of an answer is its reward."""

    def __init__(self, name: str, config: TaskConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.config = name, config
        self._tokenizer = tokenizer
        read = data.read(name, config)
        self._prompts, self.warnings = prompts.encode(name, config, read, recipe.policy, tokenizer)
        self._questions = {question.index: question for question in read.questions}

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Draw the samples that are not kept. The samples of a question are drawn by one engine."""
        config, samples = self.config, range(self.config.num_samples)
        kept = {
            index: {sample for sample in samples if answers.has(question.id, sample)}
            for index, question in self._questions.items()
        }
        missing = [prompt for prompt in self._prompts if len(kept[prompt.index]) < len(samples)]
        spec = RolloutSpec(self.name, config.num_samples, sampling(config))
        for group in engines.generate(missing, spec, config.seed, config.max_turns, kept):
            index = group.prompt.index
            text = str(self._tokenizer.decode(group.prompt.tokens))
            for sample in sorted(set(samples) - kept[index]):
                answers.add(self._answer(self._questions[index], sample, text, group.rollouts[sample]))

    def _answer(self, question: Question, sample: int, prompt: str, rollout: Rollout) -> Answer:
        text = str(self._tokenizer.decode(rollout.tokens, skip_special_tokens=True))
        return Answer(
            question.id,
            sample,
            None if rollout.failed else rollout.reward,
            rollout.metrics,
            prompt,
            text,
            rollout.drawn_tokens,
            rollout.finish,
            rollout.failure or rollout.broke,
            question.group,
        )

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return `score`, each metric that the environment gives to every judged answer, and pass@k."""
        judged = [answer for answer in answers if answer.score is not None]
        names = set.intersection(*(set(answer.metrics) for answer in judged)) if judged else set()
        found: dict[str, dict[str, list[float]]] = {"score": {}, **{name: {} for name in sorted(names)}}
        for answer in judged:
            values: dict[str, Any] = {"score": answer.score, **answer.metrics}
            for name, by_question in found.items():
                by_question.setdefault(answer.question, []).append(values[name])
        solved = found["score"]
        return {**found, **{f"pass@{k}": pass_at(solved, k) for k in self.config.pass_at}}


def sampling(config: TaskConfig) -> Sampling:
    """Return a task's sampling parameters."""
    return Sampling(config.temperature, config.top_p, config.top_k or 0, config.max_new_tokens)
