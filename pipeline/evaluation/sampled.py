"""Tasks whose answers are sampled and then scored by an environment, as in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe, prompt_tools
from pipeline.coordination.dispatch import RolloutSpec
from pipeline.data.stop_strings import rollout_text
from pipeline.evaluation import prompts, task_data
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.statistics import pass_at
from pipeline.types import Rollout, Sampling, Thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


INSTRUCTION_SHARES = ("instruction_strict", "instruction_loose")
INSTRUCTION_COUNT = "instructions"
"""Metrics of IFEval's environment."""


class GenerationTask:
    """A task of kind `generate`. The score of an answer is its reward."""

    def __init__(self, name: str, config: TaskConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.config = name, config
        self._tokenizer = tokenizer
        read = task_data.read(name, config)
        tools = prompt_tools(recipe.env, config.env_name, own_code=True)
        self._prompts, self.warnings = prompts.encode(name, config, read, recipe.policy, tokenizer, tools)
        self._questions = {question.index: question for question in read.questions}
        self.dropped = read.dropped.count

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Draw the samples that `answers` lacks or that have no score. One engine draws all samples of a question."""
        config, samples = self.config, range(self.config.num_samples)
        samples_kept = {
            index: {sample for sample in samples if answers.has(question.id, sample)}
            for index, question in self._questions.items()
        }
        missing = [prompt for prompt in self._prompts if len(samples_kept[prompt.index]) < len(samples)]
        spec = RolloutSpec(self.name, config.num_samples, sampling(config, self._tokenizer))
        for group in engines.generate(missing, spec, config.seed, config.max_turns, samples_kept):
            index = group.prompt.index
            text = str(self._tokenizer.decode(group.prompt.tokens))
            for sample in sorted(set(samples) - samples_kept[index]):
                answers.add(self._answer(self._questions[index], sample, text, group.rollouts[sample]))

    def _answer(self, question: Question, sample: int, prompt: str, rollout: Rollout) -> Answer:
        text = rollout_text(self._tokenizer, rollout)
        return Answer(
            question.id,
            sample,
            None if rollout.has_failed else rollout.reward,
            rollout.metrics,
            prompt,
            text,
            rollout.drawn_tokens,
            rollout.finish,
            rollout.failure or rollout.broke,
            question.group,
            {"extracted": rollout.extracted} if rollout.extracted else {},
        )

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return `score`, the environment's metrics, pass@k and maj@k -> question id -> values.

        pass@k and maj@k have one value per question, the other metrics one per sample. An answer that broke its environment has
        0 in each of the environment's metrics.
        """
        judged = [answer for answer in answers if answer.score is not None]
        names = sorted({name for answer in judged for name in answer.metrics})
        metrics: dict[str, dict[str, list[float]]] = {name: {} for name in ("score", *names)}
        extracted: dict[str, list[str]] = {}
        for answer in judged:
            values: dict[str, Any] = {**dict.fromkeys(names, 0.0), **answer.metrics, "score": answer.score}
            for name, by_question in metrics.items():
                by_question.setdefault(answer.question, []).append(values[name])
            extracted.setdefault(answer.question, []).append(answer.details.get("extracted", ""))
        solved = metrics["score"]
        several: dict[str, PerQuestion] = {f"pass@{k}": pass_at(solved, k) for k in self.config.pass_at}
        if self.config.majority:
            several[f"maj@{self.config.num_samples}"] = {id: [majority(solved[id], extracted[id])] for id in solved}
        return {**metrics, **several}


class InstructionTask(GenerationTask):
    """A task of kind `instructions`, with an environment of kind `ifeval`.

    In the shares of instructions, a question weighs as much as it has instructions, so a question's value can be above 1. For
    example, it is 1.5 if 3 of 4 instructions are followed and a question has 2 on average.
    """

    @override
    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return the metrics of kind `generate`. Shares of instructions are over all instructions of all questions."""
        metrics = super().metrics(answers)
        counts = {id: max(values) for id, values in metrics.get(INSTRUCTION_COUNT, {}).items()}
        mean = sum(counts.values()) / max(1, len(counts))
        for name in INSTRUCTION_SHARES:
            if name in metrics and mean:
                metrics[name] = {id: [value * counts[id] / mean for value in values] for id, values in metrics[name].items()}
        return metrics


def majority(scores: Sequence[float], extracted: Sequence[str]) -> float:
    """Return 1 if the most frequent answer scores 1, else 0; 1/n if it is one of n equally frequent answers.

    scores: of each sample. extracted: the answer of each sample; "" for a sample without an answer, which has no vote. All
    correct answers count as one answer, however they are written (0.5, 1/2).
    """
    right = [score >= 1 for score in scores]
    votes = Counter(
        None if is_right else answer for is_right, answer in zip(right, extracted, strict=True) if is_right or answer
    )
    most = max(votes.values(), default=0)
    return float(votes[None] == most) / sum(count == most for count in votes.values()) if votes[None] else 0.0


def sampling(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """Return the sampling parameters of a task's section."""
    thinking = None
    if config.thinking_tokens is not None:
        end = tokenizer(config.thinking_end, add_special_tokens=False).input_ids
        thinking = Thinking(config.thinking_tokens, config.thinking_end, tuple(end))
    limits = (config.temperature, config.top_p, config.top_k or 0, config.max_new_tokens)
    return Sampling(*limits, stop=tuple(config.stop), thinking=thinking)
