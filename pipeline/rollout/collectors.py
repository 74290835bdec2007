"""Collect the groups that a step trains on, on rank 0.

`SyncCollector` samples and trains in turn: a step's prompts go out when it begins, and all come back before it trains. With
dynamic sampling further batches follow until the step is full.

`AsyncCollector` samples ahead of training: engines go on while the train ranks learn, and a step trains on what `Buffer` gives
it. New groups are sent right after a refit, and one for each that dynamic sampling passes over: all of an engine's new work
begins with the newest weights. With `max_trajectory_age_steps` 0 nothing runs ahead, and the run is the synchronous one to the
last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pipeline.config import AsyncConfig, GenerationConfig, GRPOConfig, OnlineConfig, RewardedConfig
from pipeline.data.stream import PromptStream
from pipeline.metrics import rollout_metrics
from pipeline.rollout.buffer import Buffer, SavedGroup, decode_groups, encode_groups, resumed_metrics, staleness
from pipeline.rollout.dispatch import Dispatcher, RolloutSpec
from pipeline.rollout.failures import FailureMonitor
from pipeline.rollout.work import UnfinishedGroup
from pipeline.rpc import RpcGroup
from pipeline.types import Prompt, RolloutGroup, Sampling

ScoreGroups = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""Returns groups with the rewards that a model gives them."""

SelectGroups = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""Returns the groups that are worth training on."""


class Collector(ABC):
    """A step is `send`, `collect`, then learning, `before_refit` and the refit."""

    def __init__(self, section: OnlineConfig, dispatch: Dispatcher, judge: ScoreGroups | None, *specs: RolloutSpec, name: str):
        """judge: None if the environments give all rewards. specs: of training, of validation. name: of the section."""
        self.prompts_per_step = section.num_prompts_per_step
        self._section, self._name = section, name
        self._dispatch, self._judge = dispatch, judge or list
        self._train, self._validation = specs

    @abstractmethod
    def num_prompts_to_send(self, step: int) -> int:
        """Return how many prompts to send at the beginning of a step."""

    @abstractmethod
    def can_fill_step(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether a step can be full if these are sent for it. False only when the data have ended."""

    @abstractmethod
    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        """Have prompts sampled. step: how many steps there were, which is the version of the weights."""

    @abstractmethod
    def collect(self, prompts: PromptStream, select: SelectGroups, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Return prompts_per_step selected groups, and metrics of all that were sampled for them; fewer groups if the data end.
        Where groups are not selected, others are sampled of further prompts.

        Raises RuntimeError if as many prompts as the recipe allows do not fill the step.
        """

    def validate(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Return judged rollouts of each prompt, one group per prompt, in their order."""
        self._dispatch.send(prompts, self._validation)
        return self._judge(self._dispatch.wait_for(prompts, self._validation.purpose))

    @abstractmethod
    def before_refit(self) -> None:
        """Bring the engines to where their weights can be replaced."""

    @abstractmethod
    def state_dict(self) -> bytes:
        """Return what a checkpoint must keep: groups that are under way, or complete and not trained on. Empty if none are."""

    @abstractmethod
    def load_state_dict(self, state: bytes, step: int) -> dict[str, float]:
        """Go on with what `state_dict` kept, after the first refit. Return metrics of it, which are also printed.

        Raises ValueError if that cannot be done with this recipe.
        """

    @property
    @abstractmethod
    def pending(self) -> int:
        """The number of groups that were sent and not trained on."""

    def _sampled_metrics(self, sampled: list[RolloutGroup], selected: list[RolloutGroup], batches: float) -> dict[str, float]:
        """Return metrics of all groups that a step sampled, and of those that it trains on.

        batches: how many prompts it took, in steps' worth.
        """
        wanted, values = self.prompts_per_step, rollout_metrics("train", sampled)
        if len(selected) < len(sampled):
            values["train/dynamic_sampling_batches"] = float(batches)
            values["train/dynamic_sampling_discarded"] = float(max(0, len(selected) - wanted))
        if len(selected) >= wanted:
            values["train/selected_reward"] = rollout_metrics("train", selected[:wanted])["train/reward"]
        return values

    def _refuse_to_go_on(self, taken: str, selected: int) -> None:
        """Raise RuntimeError: dynamic sampling does not fill a step."""
        raise RuntimeError(
            f"{self._name}.dynamic_sampling_max_gen_batches: after {taken} only {selected} of {self.prompts_per_step} groups"
            f" have rewards that vary: the data are too easy or too hard for this policy, or"
            f" {self._name}.num_generations_per_prompt is too small"
        )


class SyncCollector(Collector):
    _batch: Sequence[Prompt] = ()  # under way

    @property
    def prompts_per_batch(self) -> int:
        """The number of prompts that are sampled at a time."""
        multiplier = self._section.batch_multiplier if isinstance(self._section, RewardedConfig) else 1
        return int(self.prompts_per_step * multiplier)

    def num_prompts_to_send(self, step: int) -> int:
        return self.prompts_per_batch

    def can_fill_step(self, prompts: Sequence[Prompt]) -> bool:
        return len(prompts) >= self.prompts_per_step

    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        self._batch = list(prompts)
        self._dispatch.send(prompts, self._train)

    def collect(self, prompts: PromptStream, select: SelectGroups, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        wanted = self.prompts_per_step
        sampled: list[RolloutGroup] = []
        selected: list[RolloutGroup] = []
        batches = 0
        most = getattr(self._section, "dynamic_sampling_max_gen_batches", 1)
        while self._batch and len(selected) < wanted:
            groups = self._judge(self._dispatch.wait_for(self._batch, self._train.purpose))
            sampled, selected, batches = sampled + groups, selected + select(groups), batches + 1
            self._batch = prompts.take(self.prompts_per_batch) if len(selected) < wanted else []
            if self._batch:
                if batches >= most:
                    self._refuse_to_go_on(f"{batches} batches of {self.prompts_per_batch} prompts", len(selected))
                self.send(self._batch, step)
        return selected[:wanted], self._sampled_metrics(sampled, selected, batches)

    def before_refit(self) -> None:
        """Nothing is under way."""

    def state_dict(self) -> bytes:
        return b""

    def load_state_dict(self, state: bytes, step: int) -> dict[str, float]:
        if state:
            raise ValueError(
                f"{self._name}.async_grpo.enabled: false, but the checkpoint of step {step} has rollouts that were sampled"
                " ahead, which would be lost; true, as when it was written"
            )
        return {}

    @property
    def pending(self) -> int:
        return len(self._batch)


class AsyncCollector(Collector):
    def __init__(self, section: GRPOConfig, dispatch: Dispatcher, judge: ScoreGroups | None, *specs: RolloutSpec, name: str):
        super().__init__(section, dispatch, judge, *specs, name=name)
        self._buffer = Buffer(section.async_grpo, section.num_prompts_per_step)

    @property
    def pending(self) -> int:
        return len(self._buffer.live)

    def num_prompts_to_send(self, step: int) -> int:
        return self._buffer.num_groups_to_begin(self._section.max_num_steps - step)

    def can_fill_step(self, prompts: Sequence[Prompt]) -> bool:
        return self.pending + len(prompts) >= self.prompts_per_step

    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        self._buffer.begin(prompts, step)
        self._dispatch.send(prompts, self._train)

    def collect(self, prompts: PromptStream, select: SelectGroups, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        wanted = self.prompts_per_step
        sampled: list[RolloutGroup] = []
        selected: list[RolloutGroup] = []
        before = [live for live in self._buffer.live if live.begun < step]
        while len(selected) < wanted and (groups := self._next(step, wanted - len(selected))):
            groups = self._judge(groups)
            chosen = select(groups)
            sampled, selected = sampled + groups, selected + chosen
            if passed_over := len(groups) - len(chosen):
                if len(sampled) >= self._section.dynamic_sampling_max_gen_batches * wanted:
                    self._refuse_to_go_on(f"{len(sampled)} prompts", len(selected))
                self.send(prompts.take(passed_over), step)
        if len(selected) < wanted:  # the checkpoint that is written now is of before this step, which had these
            self._buffer.restore(before)
        values = self._sampled_metrics(sampled, selected, len(sampled) / wanted)
        return selected, values | staleness(selected, step, self._buffer.max_age) | self._buffer_metrics()

    def _next(self, step: int, wanted: int) -> list[RolloutGroup]:
        """Return groups for the step; none if the data have ended."""
        self._receive(block=False)
        while (groups := self._buffer.take(step, wanted)) is None:
            if late := self._buffer.stragglers(wanted):
                self._dispatch.cut(late)
            self._receive(block=not late)  # to wait for the cut was to take in messages, perhaps the last there will be
        return groups

    def _receive(self, block: bool) -> None:
        self._dispatch.receive(block)
        for group in self._dispatch.take(self._train.purpose):
            self._buffer.complete(group)

    def _buffer_metrics(self) -> dict[str, float]:
        """Return metrics of the buffer when the step begins to learn."""
        live, answered = self._buffer.live, self._dispatch.take_answered()
        fewest, most = min(answered), max(answered)
        return {
            "async/groups_live": float(len(live)),
            "async/groups_complete": float(sum(one.group is not None for one in live)),
            "async/groups_per_engine_min": float(fewest),  # that came since the last step
            "async/groups_per_engine_max": float(most),
            "async/engine_with_fewest": float(answered.index(fewest)),
            "time/wait": self._dispatch.take_waited_s(),  # within time/rollout and time/validation
        }

    def before_refit(self) -> None:
        in_flight = self._section.async_grpo.in_flight_weight_updates
        if not in_flight and any(live.group is None for live in self._buffer.live):
            self._dispatch.drain()

    def state_dict(self) -> bytes:
        unfinished = self._dispatch.snapshot(self._train.purpose) if self.pending else {}
        self._receive(block=False)
        samples = range(self._train.samples)

        def saved(prompt: Prompt, begun: int, group: RolloutGroup | None, stand: UnfinishedGroup | None) -> SavedGroup:
            finished = dict(enumerate(group.rollouts)) if group else stand.finished
            drawn = {} if group else stand.open
            return SavedGroup(prompt, begun, finished, {i: drawn.get(i, []) for i in samples if i not in finished})

        return encode_groups(
            [saved(live.prompt, live.begun, live.group, unfinished.get(live.prompt.index)) for live in self._buffer.live]
        )

    def load_state_dict(self, state: bytes, step: int) -> dict[str, float]:
        groups = decode_groups(state)
        if not groups:
            return {}
        for saved in groups:
            if (had := len(saved.rollouts) + len(saved.open)) != self._train.samples:
                raise ValueError(
                    f"grpo.num_generations_per_prompt: {self._train.samples}, but the checkpoint of step {step} has groups of"
                    f" {had} that were sampled ahead; {had}, as when it was written"
                )
            self._buffer.begin([saved.prompt], saved.begun)
            if saved.group:
                self._buffer.complete(saved.group)
        self._buffer.check(step)
        again = [saved for saved in groups if not saved.group]
        self._dispatch.send(
            [saved.prompt for saved in again], self._train, {saved.prompt.index: saved.rollouts for saved in again}
        )
        values = resumed_metrics(groups)
        kept, redone, tokens, rest = map(int, values.values())
        print(
            f"resumed: {kept} finished rollouts kept, {redone} redone (of which {tokens} tokens had been drawn), {rest} not"
            " begun yet",
            flush=True,
        )
        return values


def build(
    name: str, section: OnlineConfig, generation: GenerationConfig, engines: Sequence[RpcGroup], judge: ScoreGroups | None
) -> Collector:
    """Return the collector that a recipe asks for.

    name: of the section in the recipe. engines: one for the ranks of each. judge: None if no model gives rewards.
    """
    grpo = isinstance(section, GRPOConfig)
    ahead = section.async_grpo if grpo else AsyncConfig()
    failures = FailureMonitor(ahead.max_generation_failures, "grpo.async_grpo.max_generation_failures" if grpo else "env")
    dispatch = Dispatcher(engines, section.seed, section.max_rollout_turns, failures)
    validation = RolloutSpec("val", section.val_num_generations_per_prompt, sampling(generation, "val_"), urgent=True)
    apart = ahead.enabled and ahead.stragglers == "cut"
    train = RolloutSpec("train", section.num_generations_per_prompt, sampling(generation), apart=apart)
    kind = AsyncCollector if ahead.enabled else SyncCollector
    return kind(section, dispatch, judge, train, validation, name=name)


def sampling(generation: GenerationConfig, prefix: str = "") -> Sampling:
    """Return how to sample. prefix: `val_` for validation, which has keys of its own."""
    return Sampling(
        temperature=getattr(generation, f"{prefix}temperature"),
        top_p=getattr(generation, f"{prefix}top_p"),
        top_k=getattr(generation, f"{prefix}top_k") or 0,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
    )
