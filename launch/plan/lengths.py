"""Assume the lengths of prompts and answers, and the distribution of answer lengths.

Answer lengths are assumed to be exponentially distributed with scale tau, and cut at a limit. Their mean is
tau (1 - exp(-limit / tau)), so the mean and the limit determine tau. If the mean is near the limit, most answers are cut, as
with a reasoning model. If the mean is far below the limit, few are cut, and the longest answer is several times the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.plan.memory_parts import longest_sequence
from pipeline.config import Recipe, generates

PROMPT_TOKENS = 256  # assumed, unless a quarter of data.max_input_seq_length is less
PROMPT_SHARE = 0.25  # assumed
ANSWER_SHARE = 0.5  # of the longest possible answer, as is assumed
EULER = 0.5772156649  # Euler's constant


@dataclass(frozen=True, slots=True)
class Lengths:
    """The assumed distribution of prompt and answer lengths."""

    prompt: float  # mean tokens; all prompts are assumed to have this length
    answer: float  # mean tokens
    limit: float  # tokens at which an answer is cut
    source: str  # where the two means come from, for the report

    @property
    def sequence(self) -> float:
        """Return the mean tokens of a sequence: prompt and answer."""
        return self.prompt + self.answer

    @property
    def scale(self) -> float:
        """Return tau, the scale of the distribution of answer lengths, in tokens; infinite if all answers reach the limit."""
        if self.answer >= self.limit * (1 - 1e-6):
            return math.inf
        low, high = self.answer, self.answer
        while high * -math.expm1(-self.limit / high) < self.answer:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if middle * -math.expm1(-self.limit / middle) < self.answer else (low, middle)
        return high

    @property
    def squared_answer(self) -> float:
        """Return the mean of an answer's squared length."""
        scale, limit = self.scale, self.limit
        if math.isinf(scale) or limit / scale < 1e-4:
            return limit * limit
        share = limit / scale
        return 2 * scale * scale * (1 - math.exp(-share) * (1 + share))

    @property
    def squared_sequence(self) -> float:
        """Return the mean of a sequence's squared length."""
        return self.prompt**2 + 2 * self.prompt * self.answer + self.squared_answer

    def longest(self, answers: float) -> float:
        """Return the expected tokens of the longest of `answers` answers."""
        scale = self.scale
        return self.limit if math.isinf(scale) else min(self.limit, scale * (math.log(max(1.0, answers)) + EULER))


def assume(
    recipe: Recipe,
    prompt: float | None = None,
    answer: float | None = None,
    source_run: str = "",
    data: tuple[float, str] | None = None,
) -> Lengths:
    """Return the lengths that a plan assumes for a recipe.

    They come from plan.prompt_tokens and plan.answer_tokens, else from an earlier run, else from the data, else from a guess.
    prompt, answer: mean tokens in the earlier run, whose description is `source_run`; an offline algorithm's run has only
    `answer`, the mean of whole sequences. data: (mean tokens, description of their source); the mean is that of prompts, or of
    an offline algorithm's whole sequences.
    """
    total, settings, of_run = longest_sequence(recipe), recipe.plan, f"the mean in {source_run}"
    if not generates(recipe) and settings.answer_tokens is None and (answer or data):
        mean, of = (answer, of_run) if answer else data or (0.0, "")
        return Lengths(0.0, min(mean, total), total, f"sequences of {mean:,.0f} tokens, {of}")
    guess = min(PROMPT_TOKENS, PROMPT_SHARE * recipe.data.max_input_seq_length, total / 2)
    of_prompts = [(settings.prompt_tokens, "plan.prompt_tokens"), (prompt, of_run)]
    of_data = [data] if data and generates(recipe) else []
    mean_prompt, source_prompt = _first(*of_prompts, *of_data, (guess, "a guess; set plan.prompt_tokens to change it"))
    mean_prompt = min(mean_prompt, total - 1)
    limit = total - mean_prompt
    if generates(recipe):
        limit = min(limit, recipe.policy.generation.max_new_tokens)
    of_answers = [(settings.answer_tokens, "plan.answer_tokens"), (answer, of_run)]
    mean, source = _first(*of_answers, (ANSWER_SHARE * limit, "a guess; set plan.answer_tokens to change it"))
    text = f"prompts of {mean_prompt:,.0f} tokens: {source_prompt}; answers of {mean:,.0f} tokens: {source}"
    return Lengths(mean_prompt, min(mean, limit), limit, text)


def _first(*sources: tuple[float | None, str]) -> tuple[float, str]:
    """Return the first mean that is known, and where it comes from."""
    return next((mean, source) for mean, source in sources if mean is not None)
