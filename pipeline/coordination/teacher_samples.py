"""Write samples for teachers with other tokenizers, before the train ranks get them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Recipe
from pipeline.data.chat import load_tokenizer
from pipeline.data.file_tokenizer import TOKENIZER_FILES
from pipeline.data.rendering import TemplateRefusal
from pipeline.data.stop_tokens import model_file
from pipeline.data.teacher_text import NotAligned, TeacherText, at_chunk_ends, unscored
from pipeline.data.token_alignment import other_vocabulary, vocabulary_difference
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import RolloutGroup, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class TeacherSamples:
    """Gives each sample the tokens of its teacher, if the teacher's vocabulary is not the policy's."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the tokenizers of teachers. tokenizer: the policy's.

        A teacher without files of a tokenizer has the policy's. Raises RecipeError for a tokenizer that cannot be aligned.
        """
        self._texts: dict[str, TeacherText] = {}
        self._logged, self._needs = False, build(recipe).needs
        for name, teacher in config.teachers(recipe).items():
            model, section = config.teacher_policy(recipe, teacher), config.teacher_section(name)
            if not self._needs.own_top_k and not any(model_file(model.tokenizer.name, file) for file in TOKENIZER_FILES):
                continue
            of_teacher = load_tokenizer(model.tokenizer)
            difference = vocabulary_difference(tokenizer.get_vocab(), of_teacher.get_vocab())
            if not difference and not self._needs.own_top_k:
                continue
            if self._needs.teacher_top_k and not self._needs.own_top_k:
                key = f"{section}.model_name"
                raise RecipeError(other_vocabulary(key, str(model.model_name), recipe.policy.tokenizer.name, difference))
            try:
                self._texts[name] = TeacherText(recipe.policy, tokenizer, model, of_teacher, recipe.data.apply_chat_template)
            except ValueError as error:
                raise RecipeError(Problem(f"{section}.tokenizer.name", "unsupported", str(error))) from None
            logger.info("%s: answers are tokenized again for it: %s", section, difference or "by kl_type")

    @property
    def matched(self) -> dict[str, np.ndarray]:
        """Teacher -> the policy's id of each of its tokens with the same text, [V] int32; NO_TOKEN for the others."""
        return {name: text.matched() for name, text in self._texts.items()}

    def write(self, groups: Sequence[RolloutGroup], samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples with their teachers' tokens, and metrics. samples: one per rollout of `groups`, in order.

        teacher/aligned_tokens: of the tokens that the loss counted before, the share that is in a chunk which both models
        score. teacher/aligned_answers: of the answers with such tokens, the share with a token in such a chunk.
        """
        written, before, after = [], [], []
        rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        for (prompt, rollout), sample in zip(rollouts, samples, strict=True):
            if (text := self._texts.get(sample.teacher)) is None:
                written.append(sample)
                continue
            aligned = unscored(sample)
            if counted := int(sample.loss_mask.sum()):
                try:
                    aligned = text.write(prompt, rollout, sample)
                except (NotAligned, TemplateRefusal) as error:
                    self._log(f"prompt {prompt.index}: its teacher does not score an answer: {error}")
                before.append(counted)
                after.append(int(aligned.loss_mask.sum()))
            aligned = aligned if aligned.loss_mask.any() else unscored(sample)
            if sample.branches:  # of agents; their texts are not aligned
                aligned = dataclasses.replace(aligned, branches=tuple(map(unscored, sample.branches)))
            written.append(at_chunk_ends(aligned) if self._needs.own_top_k else aligned)
        if not before:
            return written, {}
        share = {"tokens": sum(after) / sum(before), "answers": sum(map(bool, after)) / len(after)}
        return written, {f"teacher/aligned_{name}": value for name, value in share.items()}

    def _log(self, message: str) -> None:
        if not self._logged:
            logger.warning("%s; the metrics teacher/aligned_* count such answers", message)
        self._logged = True
