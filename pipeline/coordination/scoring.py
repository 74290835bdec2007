"""Compute rewards with a reward model: rank 0 collects rollouts, sends them to be scored, and sets their rewards.

If the reward model reads the same tokens as the policy, it scores the sampled tokens of prompt and completion. That is so if
its tokenizer has the policy's vocabulary and, for prompts that were made with a chat template, the policy's chat template.
Otherwise the conversation is tokenized again for the reward model. With a chat template, it is the prompt's messages and the
completion as the assistant's turn; without one, it is the texts of prompt and completion and the end-of-sequence token. The
chat template also ends the turn of an answer that was cut for length. White space that it writes after the end-of-turn token is
removed, as in training (`pipeline/data/preferences.py`), because the score is read where a sampled answer ends.

If a sequence has more than `policy.max_total_sequence_length` tokens, its first tokens are dropped. The score is read at the
end, so the answer must be complete, and an error would end the run for one long answer. Only text that is tokenized again can
be too long.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import config
from pipeline.config import PolicyConfig, Recipe, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.packing import plan_microbatches
from pipeline.data.plain_text import PlainText
from pipeline.data.rendering import ChatTemplate
from pipeline.data.special_tokens import SpecialTokenEscaper
from pipeline.data.stop_strings import text_before_stop
from pipeline.data.templates import check_template
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.rollout.rollout_messages import ScoreWork
from pipeline.rpc import Future
from pipeline.types import DataParallelRank, Prompt, Rollout, RolloutGroup, is_reward, whole_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Score = Callable[[list[ScoreWork]], Future[list[float]]]
"""A function that lets the reward model's ranks score sequences, with one argument for each rank."""
Encode = Callable[[Prompt, Rollout], np.ndarray]
"""(prompt, rollout) -> [L] int32, the reward model's input."""


class Scoring:
    """Sets the rewards of groups to the reward model's scores."""

    def __init__(self, recipe: Recipe, score: Score, data_ranks: list[DataParallelRank], tokenizer: PreTrainedTokenizerBase):
        """Bind to a reward model. score: scores sequences on its ranks. data_ranks: of these ranks. tokenizer: the policy's."""
        environment = config.reward_environment(recipe)
        assert environment is not None  # only such recipes are scored
        self._environment = environment
        self._model = config.reward_model_policy(recipe)
        self._score_on_ranks = score
        self._places = data_ranks
        self._encode = _encoder(recipe, self._model, self._environment, tokenizer)
        self._lowest = math.nan  # finite score of the last call that had any

    def __call__(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups, with scores as rewards in the groups whose environment is a reward model.

        Each rollout of these groups gets the metrics `reward_model_score`, and `reward_model_truncated`: 1 if the sequence was
        too long. An answer without a finite score gets the lowest finite score of this call, or of the last call that had one.
        Raises ValueError if no call had one.
        """
        judged = [(group.prompt, rollout) for group in groups if self._is_scored(group) for rollout in group.rollouts]
        sequences = [self._encode(prompt, rollout) for prompt, rollout in judged]
        limit = self._model.max_total_sequence_length
        scores = self._score([tokens[-limit:] for tokens in sequences])
        lowest = self._lowest = min(filter(is_reward, scores), default=self._lowest)
        rewarded = iter(
            [
                self._set_reward(prompt, rollout, score, lowest, len(tokens) > limit)
                for (prompt, rollout), tokens, score in zip(judged, sequences, scores, strict=True)
            ]
        )
        return [
            dataclasses.replace(group, rollouts=tuple(itertools.islice(rewarded, len(group.rollouts))))
            if self._is_scored(group)
            else group
            for group in groups
        ]

    def _is_scored(self, group: RolloutGroup) -> bool:
        return group.prompt.environment == self._environment

    def _set_reward(self, prompt: Prompt, rollout: Rollout, score: float, lowest: float, truncated: bool) -> Rollout:
        broke = "" if is_reward(score) else f"the reward model scores it {score}"
        if broke and not math.isfinite(lowest):
            raise ValueError(
                f"env.{self._environment}: got score {score} for an answer to prompt {prompt.index}; expected a finite score"
                " for at least one answer. Try another reward model or precision"
            )
        score = lowest if broke else score
        metrics = {**rollout.metrics, "reward_model_score": score, "reward_model_truncated": float(truncated)}
        turns = whole_reward(rollout.turns, score)
        return dataclasses.replace(rollout, turns=turns, reward=score, metrics=metrics, broke=broke or rollout.broke)

    def _score(self, sequences: list[np.ndarray]) -> list[float]:
        if not sequences:
            return []
        packing = self._model.sequence_packing
        bounds = (packing.logprob_mb_tokens, None) if packing.enabled else (None, self._model.logprob_batch_size)
        plan = plan_microbatches([len(tokens) for tokens in sequences], self._places[0].size, *bounds)
        works = [ScoreWork([[sequences[i] for i in members] for members in microbatches]) for microbatches in plan]
        replies = self._score_on_ranks([works[data_rank.rank] for data_rank in self._places]).result()
        scores = [math.nan] * len(sequences)
        for data_rank, reply in zip(self._places, replies, strict=True):  # ranks that share a data rank reply the same
            for i, score in zip(itertools.chain(*plan[data_rank.rank]), reply, strict=True):
                scores[i] = score
        return scores


# ---- the reward model's input -------------------------------------------------------------------------------------------


def _encoder(recipe: Recipe, model: PolicyConfig, environment: str, policy: PreTrainedTokenizerBase) -> Encode:
    """Return the function that encodes rollouts. policy: its tokenizer. Raises RecipeError if a chat template is missing."""
    chat, reward = recipe.data.apply_chat_template, load_tokenizer(model.tokenizer)
    if _same_tokens(policy, reward, recipe.policy.tokenizer, model.tokenizer, chat):
        return lambda prompt, rollout: np.concatenate([prompt.tokens, rollout.tokens])
    if chat and not reward.chat_template:
        message = (
            f"got null, and {model.tokenizer.name} has none; expected a chat template, since the policy's tokenizer differs"
        )
        raise RecipeError(Problem(f"env.{environment}.tokenizer.chat_template", "missing-value", message))
    if chat:
        check_template(reward, model.tokenizer.chat_template_kwargs, f"env.{environment}.tokenizer.chat_template")
    template = ChatTemplate(reward, model.tokenizer.chat_template_kwargs)
    return _Retokenizer(environment, policy, reward, chat, template, PlainText(reward), SpecialTokenEscaper(reward))


def _same_tokens(
    policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, our: TokenizerConfig, their: TokenizerConfig, chat: bool
) -> bool:
    if policy.get_vocab() != reward.get_vocab():
        return False
    options = their.chat_template_kwargs in (None, our.chat_template_kwargs)
    return not chat or (policy.chat_template == reward.chat_template and options)


@dataclass(frozen=True)
class _Retokenizer:
    """Tokenizes a conversation with the reward model's own tokenizer."""

    environment: str
    policy: PreTrainedTokenizerBase
    reward: PreTrainedTokenizerBase
    chat: bool
    template: ChatTemplate
    plain: PlainText
    escaper: SpecialTokenEscaper  # of `reward`: special tokens that the policy writes as text stay text

    def __call__(self, prompt: Prompt, rollout: Rollout) -> np.ndarray:
        if len(rollout.turns) > 1:
            turns = len(rollout.turns)
            message = f"got an episode of {turns} turns; expected 1. Try a reward model with the policy's tokenizer"
            raise RecipeError(Problem(f"env.{self.environment}", "unsupported", message))
        answer = self.escaper.escape(text_before_stop(self.policy, rollout.tokens.tolist(), rollout.stop))
        if self.chat:
            messages = [*self._task(prompt, "messages"), {"role": "assistant", "content": answer}]
            text = self.template.text(messages, **prompt.task.get("template_options", {}))
            if (stripped := text.rstrip()).endswith(self._special):
                text = stripped
            tokens = self.escaper.tokenize(text)
        else:
            tokens = [*self.plain.tokens(self._task(prompt, "text")), *self.escaper.tokenize(answer)]
            tokens += self.plain.end if rollout.finish == "stop" else []
        return np.asarray(tokens, np.int32)

    @property
    def _special(self) -> tuple[str, ...]:
        return tuple(token.content for token in self.reward.added_tokens_decoder.values() if token.special)

    def _task(self, prompt: Prompt, key: str) -> Any:
        if key not in prompt.task:
            message = (
                f"got prompt {prompt.index} with {', '.join(prompt.task)}; expected {key} too, since the reward model's"
                " tokenizer differs from the policy's. Try a reward model with the policy's tokenizer"
            )
            raise RecipeError(Problem(f"env.{self.environment}", "missing-column", message))
        return prompt.task[key]
