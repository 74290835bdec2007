"""Warn if a run continues but learns nothing, and name the likely cause.

Each sign of this is one function of the last steps, and one line of SIGNS. The function returns a message while the sign holds,
and "" otherwise. A sign must hold for STEPS steps in a row. One step is not enough, because all answers of a small step may be
cut or get equal rewards by chance. But a run should warn within minutes, not hours.

A step without a signal is no error. Its loss and gradient are 0, as in NeMo-RL and verl, whose means over no tokens are 0 too:
a policy may find its first reward after many steps, and a batch may have no token to learn from.

Another warning needs one step or validation alone: `lost_episodes`.

These warnings do not depend on `logger.monitor.period_s`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import config
from pipeline.algorithms.sections import RewardedConfig
from pipeline.config import Recipe
from pipeline.observe.warning_file import AGAIN_STEPS, LOST_EPISODES, append, cleared_line, warning
from pipeline.types import Rollout, RolloutGroup, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

STEPS = 3
"""Steps in a row for which a sign must hold."""
JUDGEMENTS = 3
"""Judgements that a warning shows."""
SHOWN_TOKENS, SHOWN_CHARACTERS = 40, 60
"""Maximum tokens and characters of the end of a prompt or an answer that a warning shows; of an error, of each end."""
UNMATCHED = 0.1
"""Share of an agent's answers in histories that are encoded again, from which on a warning is given."""
LOST = 0.5
"""Share of an environment's episodes of a step that break or are left out, from which on a warning is given."""
SAME = 1e-5
"""Rewards count as equal if they differ by less than this, relative to the largest: float32 rewards differ by rounding."""


@dataclass(frozen=True)
class StepSummary:
    """The values of a step that signs read."""

    step: int
    tokens: int  # that the loss counts
    advantage: bool | None  # whether any of them has one; None: the train ranks compute them, or the loss has none
    values: Mapping[str, float]  # the step's metrics
    rollouts: tuple[Rollout, ...]  # with a reward; none of a step on a data set
    newest: int | None  # version of the newest weights that sampled

    @property
    def rewards(self) -> list[float]:
        """Return the rewards."""
        return [rollout.reward for rollout in self.rollouts]


@dataclass(frozen=True)
class RunReader:
    """The values of a run that the signs' messages need."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    stops: Callable[[], str]  # describes the stop tokens in use
    groups: Sequence[RolloutGroup]  # of the last step

    def judgements(self) -> str:
        """Return the first judgements of the last step, each with the ends of its prompt and answer."""
        pairs = ((group, rollout) for group in self.groups for rollout in group.rollouts if not rollout.failure)
        return "; ".join(self._judgement(group, rollout) for (group, rollout), _ in zip(pairs, range(JUDGEMENTS), strict=False))

    def _judgement(self, group: RolloutGroup, rollout: Rollout) -> str:
        expected = group.prompt.task.get("answer")
        parts = [
            f"prompt {self._end(group.prompt.tokens)}",
            f"answer {self._end(rollout.turns[-1].completion.tokens if rollout.turns else [])}",
            *([] if expected is None else [f"expected {_quote(str(expected))}"]),
            *([f"extracted {_quote(rollout.extracted)}"] if rollout.extracted else []),
            *([f"the environment failed: {_quote(rollout.broke, SHOWN_CHARACTERS)}"] if rollout.broke else []),
            f"reward {rollout.reward:g}",
        ]
        return ", ".join(parts)

    def _end(self, tokens: Iterable[int]) -> str:
        return _quote(str(self.tokenizer.decode([int(token) for token in tokens][-SHOWN_TOKENS:])))


def _quote(text: str, head: int = 0) -> str:
    """Return a text in quotes: its last SHOWN_CHARACTERS, and its first `head` characters, which name an error's type."""
    shown = text if len(text) <= head + SHOWN_CHARACTERS else f"{text[:head]}...{text[-SHOWN_CHARACTERS:]}"
    return json.dumps(shown, ensure_ascii=False)


Sign = Callable[[Sequence[StepSummary], RunReader], str]


def cut_answers(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if every answer ends at the length limit."""
    rollouts = [rollout for step in steps for rollout in step.rollouts]
    if not rollouts or any(rollout.finish != "length" for rollout in rollouts):
        return ""
    return (
        f"all {len(rollouts)} answers of the last {len(steps)} steps are cut at the length limit. {_limits(reader)} If the"
        " model ends its answers in another way, set policy.generation.stop_token_ids or stop_strings. If it needs more room,"
        " raise the limits"
    )


def rewritten_histories(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if agents send back many of the policy's answers after a change, so that they are encoded again."""
    shares = [step.values.get("train/unmatched_answers", 0.0) for step in steps]
    if min(shares) < UNMATCHED:
        return ""
    return (
        f"{min(shares):.0%} or more of the policy's answers in the histories that agents send are not the tokens that it"
        " sampled, because something before them has changed. The policy reads tokens that it did not choose. Try an agent that"
        " appends to its history, and compare `turns` and `branches` in rollouts/"
    )


def _limits(reader: RunReader) -> str:
    generation = reader.recipe.policy.generation
    strings = f", stop strings {generation.stop_strings}" if generation.stop_strings else ""
    return (
        f"Stop tokens in use: {reader.stops()}{strings}; policy.generation.max_new_tokens={generation.max_new_tokens},"
        f" policy.max_total_sequence_length={reader.recipe.policy.max_total_sequence_length}."
    )


def empty_answers(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if every answer is empty or only a stop token."""
    rollouts = [rollout for step in steps for rollout in step.rollouts]
    if not rollouts or any(rollout.drawn_tokens > 1 for rollout in rollouts):
        return ""
    return (
        f"all {len(rollouts)} answers of the last {len(steps)} steps have at most one token. Stop tokens in use:"
        f" {reader.stops()}. Look at the end of a prompt, which may already end the turn: {reader.judgements()}"
    )


def equal_rewards(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if all rewards are the same."""
    rewards = [reward for step in steps for reward in step.rewards]
    if not rewards or not isinstance(config.section(reader.recipe), RewardedConfig) or not _equal(rewards):
        return ""
    why = (
        "The task may be too easy"
        if rewards[0] >= 1
        else "The task may be too hard, or the environment may misread the answers"
    )
    return (
        f"all {len(rewards)} rewards of the last {len(steps)} steps are {rewards[0]:g}. {why}. The first judgements:"
        f" {reader.judgements()}"
    )


def _equal(rewards: Sequence[float]) -> bool:
    return bool(np.ptp(rewards) <= SAME * max(1.0, np.abs(rewards).max()))


def no_advantage(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if rewards are equal within each group, though groups differ, so that no token has an advantage."""
    rewards = [reward for step in steps for reward in step.rewards]
    if not rewards or _equal(rewards) or any(step.advantage is not False or not step.tokens for step in steps):
        return ""
    name = reader.recipe.algorithm
    return (
        f"no token of the last {len(steps)} steps has an advantage: the answers to each prompt have equal rewards. Try more"
        f" answers to a prompt ({name}.num_generations_per_prompt), a higher temperature, or {name}.use_dynamic_sampling=true"
    )


def no_trained_token(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if the loss counts no token."""
    if any(step.tokens for step in steps):
        return ""
    cut = steps[0].rollouts and all(rollout.finish == "length" for step in steps for rollout in step.rollouts)
    why = f"All answers are cut, and cut answers are left out. {_limits(reader)}" if cut else "All tokens are masked"
    return f"the loss of the last {len(steps)} steps counts no token, so nothing is learned. {why}"


def no_gradient(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if the gradient or the learning rate is 0."""
    for key, quantity, cure in (
        ("train/lr", "the learning rate", "Look at policy.optimizer.kwargs.lr and policy.scheduler"),
        ("train/grad_norm", "the gradient", "Look at which parameters are frozen, and at the advantages"),
    ):
        if all(step.values.get(key) == 0 and step.tokens and step.advantage is not False for step in steps):
            return f"{quantity} of the last {len(steps)} steps is 0 ({key}), so the weights do not change. {cure}"
    return ""


def old_weights(steps: Sequence[StepSummary], reader: RunReader) -> str:
    """Return a message if engines sample with weights that a refit should have replaced."""
    ahead = config.ahead(reader.recipe) if config.runs_ahead(reader.recipe) else None
    allowed = ahead.max_trajectory_age_steps if ahead else 0
    if any(step.newest is None or step.newest >= step.step - 1 - allowed for step in steps):
        return ""
    return (
        f"the engines sampled step {steps[-1].step} with the weights of step {steps[-1].newest}: refits do not reach them. Set"
        " policy.generation.refit_cfg.digest, which compares the weights of train ranks and engines"
    )


OF_ANSWERS: tuple[Sign, ...] = (cut_answers, empty_answers, equal_rewards, no_advantage)
SIGNS = (*OF_ANSWERS, rewritten_histories, no_trained_token, no_gradient, old_weights)


def lost_episodes(when: str, groups: Sequence[RolloutGroup]) -> dict[str, str]:
    """Return environment -> message, for environments of which at least LOST of the episodes broke or were left out.

    when: names the step or the validation of the episodes.
    """
    episodes: dict[str, list[Rollout]] = {}
    for group in groups:
        episodes.setdefault(group.prompt.environment, []).extend(group.rollouts)
    messages = {}
    for name, rollouts in episodes.items():
        left_out = [rollout.failure for rollout in rollouts if rollout.has_failed]
        broken = [rollout.broke for rollout in rollouts if rollout.broke]
        if (left_out or broken) and len(left_out) + len(broken) >= LOST * len(rollouts):
            counts = {"were left out": len(left_out), "broke and count as wrong": len(broken)}
            said = " and ".join(f"{count} {what}" for what, count in counts.items() if count)
            cause = Counter([*left_out, *broken]).most_common(1)[0][0]
            who = f"env.{name}" if name else "the reward model"
            messages[name] = f"{who}: of {len(rollouts)} episodes of {when}, {said}: {cause}"
    return messages


class LearningMonitor:
    """Looks at each step for signs that the run learns nothing. If this raises, the run continues without the warnings."""

    def __init__(self, recipe: Recipe, tokenizer: Any, stops: Callable[[], str], file: Path):
        """Prepare to check steps. stops: a function that describes the stop tokens in use. file: for the warnings."""
        self._recipe, self._tokenizer, self._stops, self._file = recipe, tokenizer, stops, file
        self._steps: deque[StepSummary] = deque(maxlen=STEPS)
        self._given: dict[str, int] = {}  # sign that holds -> step of its last warning
        self._samples: Sequence[Sample] = ()
        self._estimates = False

    def note_learning(self, samples: Sequence[Sample], estimates: bool) -> None:
        """Remember the samples on which the train ranks learn in this step. estimates: whether they compute the advantages."""
        self._samples, self._estimates = samples, estimates

    def episodes_ended(self, step: int, kind: str, groups: Sequence[RolloutGroup]) -> None:
        """Warn of environments that lose episodes, each at most once in AGAIN_STEPS. kind: "step" or "val"."""
        try:
            when = f"step {step}" if kind == "step" else f"the validation after step {step}"
            for name, message in lost_episodes(when, groups).items():
                check = f"{LOST_EPISODES} of {name}, {kind}"
                if step - self._given.get(check, -AGAIN_STEPS) >= AGAIN_STEPS:
                    self._given[check] = step
                    place = f"; see rollouts/{kind}_{step:06d}.jsonl" if self._recipe.logger.num_rollouts_to_log != 0 else ""
                    logger.warning("%s%s", message, place)
                    append(self._file, [warning(step, check, 0, "", message + place)])
        except Exception:
            logger.exception("the episodes of step %d are not checked for failures; the run goes on", step)

    def step_ended(self, step: int, values: Mapping[str, float], groups: Sequence[RolloutGroup] | None) -> None:
        """Check a step, and write the warnings that begin to hold, still hold after AGAIN_STEPS, or hold no longer."""
        try:
            self._steps.append(self._summary(step, values, groups or ()))
            self._samples = ()
            if len(self._steps) == STEPS:
                append(self._file, list(self._look(step, RunReader(self._recipe, self._tokenizer, self._stops, groups or ()))))
        except Exception:
            logger.exception("step %d is not checked for signs of failed learning; the run goes on", step)

    def _summary(self, step: int, values: Mapping[str, float], groups: Sequence[RolloutGroup]) -> StepSummary:
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts if not rollout.failure)
        tokens = int(sum(sample.loss_mask.sum() for sample in self._samples))
        is_known = groups and not self._estimates and isinstance(config.section(self._recipe), RewardedConfig)
        advantage = any(sample.advantages.any() for sample in self._samples) if is_known else None
        newest = max((span.version for rollout in rollouts for span in rollout.spans), default=None)
        return StepSummary(step, tokens, advantage, values, rollouts, newest)

    def _look(self, step: int, reader: RunReader) -> Iterator[dict[str, Any]]:
        for sign in SIGNS:
            name, message = sign.__name__, sign(self._steps, reader)
            if message and step - self._given.get(name, -AGAIN_STEPS) >= AGAIN_STEPS:
                self._given[name] = step
                logger.warning("step %d: %s", step, message)
                yield warning(step, name, 0, "", message)
            elif not message and self._given.pop(name, None) is not None:
                logger.info("step %d: the warning %s no longer applies", step, name)
                yield cleared_line(step, name)
