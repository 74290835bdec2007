"""Sampling and training in turn: a step's prompts go out when it begins, and all of them come back before it trains.

With dynamic sampling further batches follow until the step is full.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import OnlineConfig, RewardedConfig
from pipeline.data.stream import PromptStream
from pipeline.experience.base import Experience, Judge, Select, refuse_to_go_on, sampled_metrics
from pipeline.experience.dispatch import Dispatch, Order
from pipeline.types import Prompt, RolloutGroup


class Synchronous(Experience):
    def __init__(
        self, name: str, section: OnlineConfig, dispatch: Dispatch, judge: Judge | None, train: Order, validation: Order
    ):
        """name: of the section in the recipe."""
        super().__init__(section.num_prompts_per_step, dispatch, judge, train, validation)
        self._name = name
        self._section = section
        self._batch: list[Prompt] = []  # under way

    @property
    def prompts_per_batch(self) -> int:
        """How many prompts are sampled at a time."""
        multiplier = self._section.batch_multiplier if isinstance(self._section, RewardedConfig) else 1
        return int(self.prompts_per_step * multiplier)

    def room(self, step: int) -> int:
        return self.prompts_per_batch

    def enough(self, prompts: Sequence[Prompt]) -> bool:
        return len(prompts) >= self.prompts_per_step

    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        self._batch = list(prompts)
        self._dispatch.send(prompts, self._train)

    def collect(self, prompts: PromptStream, select: Select, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        wanted = self.prompts_per_step
        sampled: list[RolloutGroup] = []
        selected: list[RolloutGroup] = []
        batches = 0
        while self._batch and len(selected) < wanted:
            groups = self._judge(self._dispatch.wait_for(self._batch, self._train.purpose))
            sampled, selected, batches = sampled + groups, selected + select(groups), batches + 1
            self._batch = prompts.take(self.prompts_per_batch) if len(selected) < wanted else []
            if self._batch:
                self._bound(batches, len(selected))
                self.send(self._batch, step)
        return selected[:wanted], sampled_metrics(sampled, selected, wanted, batches)

    def _bound(self, batches: int, selected: int) -> None:
        most = getattr(self._section, "dynamic_sampling_max_gen_batches", 1)
        if batches >= most:
            taken = f"{batches} batches of {self.prompts_per_batch} prompts"
            refuse_to_go_on(self._name, taken, selected, self.prompts_per_step)

    def before_refit(self) -> None:
        """Nothing is under way."""

    def record(self) -> bytes:
        return b""

    def resume(self, record: bytes, step: int) -> dict[str, float]:
        if record:
            raise ValueError(
                f"{self._name}.async_grpo.enabled: false, but the checkpoint of step {step} has rollouts that were sampled"
                " ahead, which would be lost; true, as when it was written"
            )
        return {}

    @property
    def pending(self) -> int:
        return len(self._batch)
