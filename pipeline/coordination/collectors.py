"""Collect the groups that a step trains on, on rank 0.

`SyncCollector` alternates sampling and training: a step sends its prompts at its beginning, and trains when all groups are
back. With dynamic sampling it samples further batches until the step is full.

`AsyncCollector` samples ahead of training: engines continue while the train ranks learn, and a step trains on the groups that
`Buffer` selects. New groups are sent right after a refit, and a new group for each group that dynamic sampling discards, so all
new work of an engine begins with the newest weights. With `max_trajectory_age_steps` 0 no sampling runs ahead, and the run
equals the synchronous run to the last bit, on CPUs or with policy.deterministic.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from typing_extensions import override

from pipeline.algorithms.ahead import key_in, settings_in
from pipeline.config import AsyncConfig, GenerationConfig, OnlineConfig, RewardedConfig
from pipeline.coordination.buffer import Buffer, SavedGroup, decode_groups, encode_groups, resumed_metrics, staleness
from pipeline.coordination.dispatch import Dispatcher, RolloutSpec
from pipeline.data.mixture import Mixture
from pipeline.data.stream import Stream
from pipeline.observe.rollout_metrics import rollout_metrics
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.roles import GenerateRole
from pipeline.rollout.failures import FailureMonitor
from pipeline.rollout.rollout_messages import UnfinishedGroup
from pipeline.rpc import RpcGroup
from pipeline.types import Prompt, RolloutGroup, Sampling

logger = logging.getLogger(__name__)

Prompts = Stream[Prompt] | Mixture[Prompt]
"""A stream of prompts."""

ScoreGroups = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""A function that returns the groups with a reward model's rewards."""

SelectGroups = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""A function that returns those of the given groups to train on."""


class Collector(ABC):
    """Collects groups: SyncCollector, AsyncCollector.

    A step calls `send` and `collect`, learns, and calls `before_refit` and then refits.
    """

    def __init__(self, section: OnlineConfig, dispatch: Dispatcher, judge: ScoreGroups | None, *specs: RolloutSpec, name: str):
        """Bind a collector to the recipe's section `name`.

        judge: None if the environments give all rewards. specs: of training and of validation.
        """
        self.prompts_per_step = section.num_prompts_per_step
        self._section, self._name = section, name
        self._dispatch, self._judge = dispatch, judge or list
        self._train, self._validation = specs

    @abstractmethod
    def num_prompts_to_send(self, step: int) -> int:
        """Return how many prompts to send at the beginning of a step."""

    @abstractmethod
    def can_fill_step(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether a step can be full if these prompts are sent. False only when the data have ended."""

    @abstractmethod
    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        """Send prompts for sampling. step: number of completed steps, which is the version of the weights."""

    @abstractmethod
    def collect(self, prompts: Prompts, select: SelectGroups, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Return prompts_per_step selected groups, or fewer if the data end, and metrics of all groups sampled for them.

        Groups that are not selected are replaced by groups of further prompts. Raises RuntimeError if the most prompts that the
        recipe allows do not fill the step.
        """

    def validate(self, prompts: Sequence[Prompt], step: int = 0) -> list[RolloutGroup]:
        """Return judged rollouts of each prompt, one group per prompt, in their order. step: number of completed steps."""
        self._dispatch.send(prompts, self._validation, step=step)
        return self._judge(self._dispatch.wait_for(prompts, self._validation.purpose))

    @abstractmethod
    def before_refit(self) -> None:
        """Bring the engines to a state in which their weights can be replaced."""

    @abstractmethod
    def state_dict(self) -> bytes:
        """Return the groups that are in progress, or complete and not trained on, for a checkpoint. Empty if there are none."""

    @abstractmethod
    def load_state_dict(self, state: bytes, step: int) -> dict[str, float]:
        """Resume the groups of `state_dict`, after the first refit. Return metrics of the restart, which are also logged.

        Raises RecipeError if this recipe cannot resume them.
        """

    @property
    @abstractmethod
    def pending(self) -> int:
        """Number of groups that were sent and not trained on."""

    def _sampled_metrics(self, sampled: list[RolloutGroup], selected: list[RolloutGroup], batches: float) -> dict[str, float]:
        """Return metrics of all groups that a step sampled, and of the groups that it trains on.

        batches: number of prompts that were sampled, as a multiple of the prompts of a step.
        """
        per_step, values = self.prompts_per_step, rollout_metrics("train", sampled)
        if len(selected) < len(sampled):
            values["train/dynamic_sampling_batches"] = float(batches)
            values["train/dynamic_sampling_discarded"] = float(max(0, len(selected) - per_step))
        if len(selected) >= per_step:
            values["train/selected_reward"] = rollout_metrics("train", selected[:per_step])["train/reward"]
        return values

    def _refuse_to_go_on(self, sampled: str, selected: int) -> None:
        """Raise the RuntimeError that says that dynamic sampling does not fill a step."""
        raise RuntimeError(
            f"{self._name}.dynamic_sampling_max_gen_batches: after {sampled}, only {selected} groups have rewards that vary;"
            f" a step needs {self.prompts_per_step}. The data are too easy or too hard for this policy, or"
            f" {self._name}.num_generations_per_prompt is too small"
        )


class SyncCollector(Collector):
    """Alternates sampling and training."""

    _batch: Sequence[Prompt] = ()  # in progress

    @property
    def prompts_per_batch(self) -> int:
        """Number of prompts that are sampled at a time."""
        multiplier = self._section.batch_multiplier if isinstance(self._section, RewardedConfig) else 1
        return int(self.prompts_per_step * multiplier)

    @override
    def num_prompts_to_send(self, step: int) -> int:
        return self.prompts_per_batch

    @override
    def can_fill_step(self, prompts: Sequence[Prompt]) -> bool:
        return len(prompts) >= self.prompts_per_step

    @override
    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        self._batch = list(prompts)
        self._dispatch.send(prompts, self._train, step=step)

    @override
    def collect(self, prompts: Prompts, select: SelectGroups, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        per_step = self.prompts_per_step
        sampled: list[RolloutGroup] = []
        selected: list[RolloutGroup] = []
        batches = 0
        most = getattr(self._section, "dynamic_sampling_max_gen_batches", 1)
        while self._batch and len(selected) < per_step:
            groups = self._judge(self._dispatch.wait_for(self._batch, self._train.purpose))
            prompts.observe(groups)
            sampled, selected, batches = sampled + groups, selected + select(groups), batches + 1
            self._batch = prompts.take(self.prompts_per_batch) if len(selected) < per_step else []
            if self._batch:
                if batches >= most:
                    self._refuse_to_go_on(f"{batches} batches of {self.prompts_per_batch} prompts", len(selected))
                self.send(self._batch, step)
        return selected[:per_step], self._sampled_metrics(sampled, selected, batches)

    def before_refit(self) -> None:
        """Do nothing, as no group is in progress."""

    @override
    def state_dict(self) -> bytes:
        return b""

    @override
    def load_state_dict(self, state: bytes, step: int) -> dict[str, float]:
        if state:
            message = (
                f"got false, but the checkpoint of step {step} has rollouts that were sampled ahead and would be lost; expected"
                " true, as in its run"
            )
            raise RecipeError(Problem(f"{key_in(self._section, self._name)}.enabled", "run-exists", message))
        return {}

    @property
    @override
    def pending(self) -> int:
        return len(self._batch)


class AsyncCollector(Collector):
    """Samples ahead of training."""

    def __init__(
        self,
        section: RewardedConfig,
        ahead: AsyncConfig,
        dispatch: Dispatcher,
        judge: ScoreGroups | None,
        *specs: RolloutSpec,
        name: str,
    ):
        super().__init__(section, dispatch, judge, *specs, name=name)
        self._rewarded, self._ahead = section, ahead
        self._buffer = Buffer(ahead, section.num_prompts_per_step, key_in(section, name))

    @property
    @override
    def pending(self) -> int:
        return len(self._buffer.live)

    @override
    def num_prompts_to_send(self, step: int) -> int:
        return self._buffer.num_groups_to_begin(self._rewarded.max_num_steps - step)

    @override
    def can_fill_step(self, prompts: Sequence[Prompt]) -> bool:
        return self.pending + len(prompts) >= self.prompts_per_step

    @override
    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        self._buffer.begin(prompts, step)
        self._dispatch.send(prompts, self._train, step=step)

    @override
    def collect(self, prompts: Prompts, select: SelectGroups, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        per_step = self.prompts_per_step
        sampled: list[RolloutGroup] = []
        selected: list[RolloutGroup] = []
        older = [live for live in self._buffer.live if live.begun < step]
        while len(selected) < per_step and (groups := self._next(step, per_step - len(selected))):
            groups = self._judge(groups)
            prompts.observe(groups)
            chosen = select(groups)
            sampled, selected = sampled + groups, selected + chosen
            if passed_over := len(groups) - len(chosen):
                if len(sampled) >= self._rewarded.dynamic_sampling_max_gen_batches * per_step:
                    self._refuse_to_go_on(f"{len(sampled)} prompts", len(selected))
                self.send(prompts.take(passed_over), step)
        if len(selected) < per_step:  # the data have ended; the checkpoint keeps the groups of before this step
            self._buffer.restore(older)
        values = self._sampled_metrics(sampled, selected, len(sampled) / per_step)
        return selected, values | staleness(selected, step, self._buffer.max_age) | self._buffer_metrics()

    def _next(self, step: int, count: int) -> list[RolloutGroup]:
        """Return groups for the step; [] if the data have ended."""
        self._receive(block=False)
        while (groups := self._buffer.take(step, count)) is None:
            if late := self._buffer.stragglers(count):
                self._dispatch.cut(late)
            self._receive(block=not late)  # `cut` has received messages, perhaps the last ones
        return groups

    def _receive(self, block: bool) -> None:
        self._dispatch.receive(block)
        for group in self._dispatch.take(self._train.purpose):
            self._buffer.complete(group)

    def _buffer_metrics(self) -> dict[str, float]:
        """Return metrics of the buffer at the time when the step begins to learn."""
        live, received = self._buffer.live, self._dispatch.take_received_counts()
        fewest, most = min(received), max(received)
        return {
            "async/groups_live": float(len(live)),
            "async/groups_complete": float(sum(group.group is not None for group in live)),
            "async/groups_per_engine_min": float(fewest),  # received since the last step
            "async/groups_per_engine_max": float(most),
            "async/engine_with_fewest": float(received.index(fewest)),
            "time/wait": self._dispatch.take_waited_s(),  # part of time/rollout and time/validation
        }

    @override
    def before_refit(self) -> None:
        in_flight = self._ahead.in_flight_weight_updates
        if not in_flight and any(live.group is None for live in self._buffer.live):
            self._dispatch.drain()

    @override
    def state_dict(self) -> bytes:
        unfinished = self._dispatch.snapshot(self._train.purpose) if self.pending else {}
        self._receive(block=False)
        samples = range(self._train.samples)

        def save_group(prompt: Prompt, begun: int, group: RolloutGroup | None, state: UnfinishedGroup | None) -> SavedGroup:
            if group:
                return SavedGroup(prompt, begun, dict(enumerate(group.rollouts)), {})
            assert state is not None  # every group that is not complete is in progress
            finished, spans = state.finished, state.open
            return SavedGroup(prompt, begun, finished, {i: spans.get(i, []) for i in samples if i not in finished})

        return encode_groups(
            [save_group(live.prompt, live.begun, live.group, unfinished.get(live.prompt.index)) for live in self._buffer.live]
        )

    @override
    def load_state_dict(self, state: bytes, step: int) -> dict[str, float]:
        groups = decode_groups(state)
        if not groups:
            return {}
        for saved in groups:
            if (had := len(saved.rollouts) + len(saved.open)) != self._train.samples:
                message = (
                    f"got {self._train.samples}, but the checkpoint of step {step} has groups of {had} rollouts that were"
                    f" sampled ahead; expected {had}, as in its run"
                )
                raise RecipeError(Problem(f"{self._name}.num_generations_per_prompt", "run-exists", message))
            self._buffer.begin([saved.prompt], saved.begun)
            if saved.group:
                self._buffer.complete(saved.group)
        self._buffer.check(step)
        unfinished = [saved for saved in groups if not saved.group]
        finished = {saved.prompt.index: saved.rollouts for saved in unfinished}
        for begun, alike in itertools.groupby(unfinished, lambda saved: saved.begun):
            self._dispatch.send([saved.prompt for saved in alike], self._train, finished, step=begun)
        values = resumed_metrics(groups)
        kept, redone, tokens, unsent = map(int, values.values())
        logger.info(
            f"resumed: {kept} finished rollouts kept, {redone} sampled again (their {tokens} tokens are lost), {unsent} not"
            " begun yet"
        )
        return values


def build(
    name: str,
    section: OnlineConfig,
    generation: GenerationConfig,
    engines: Sequence[RpcGroup[GenerateRole]],
    judge: ScoreGroups | None,
) -> Collector:
    """Return the collector of a recipe.

    name: of the section in the recipe. engines: one group of ranks for each engine. judge: None if no model gives rewards.
    """
    _, ahead = settings_in(section) or ("", None)
    failures_key = f"{key_in(section, name)}.max_generation_failures" if ahead else "env"
    ahead = ahead or AsyncConfig()
    failures = FailureMonitor(ahead.max_generation_failures, failures_key)
    dispatch = Dispatcher(engines, section.seed, section.max_rollout_turns, failures)
    validation = RolloutSpec("val", section.val_num_generations_per_prompt, sampling(generation, "val_"), urgent=True)
    apart = ahead.enabled and ahead.stragglers == "cut"
    train = RolloutSpec("train", section.num_generations_per_prompt, sampling(generation), apart=apart)
    if isinstance(section, RewardedConfig) and ahead.enabled:
        return AsyncCollector(section, ahead, dispatch, judge, train, validation, name=name)
    return SyncCollector(section, dispatch, judge, train, validation, name=name)


def sampling(generation: GenerationConfig, prefix: str = "") -> Sampling:
    """Return the sampling parameters. prefix: `val_` for validation, which has keys of its own."""
    return Sampling(
        temperature=getattr(generation, f"{prefix}temperature"),
        top_p=getattr(generation, f"{prefix}top_p"),
        top_k=getattr(generation, f"{prefix}top_k") or 0,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
        stop=tuple(generation.stop_strings or ()),
    )
