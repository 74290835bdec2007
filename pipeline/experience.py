"""What a step learns from, gathered on rank 0: prompts go to the engines, judged groups come back, until the step is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config import OnlineConfig, RewardedConfig
from pipeline.data.stream import PromptStream
from pipeline.metrics import rollout_metrics
from pipeline.remote import Remote
from pipeline.rollout.work import RolloutWork
from pipeline.types import Prompt, RolloutGroup, Sampling
from pipeline.world import Realms

Judge = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""Gives groups the rewards that a model gives them."""

Select = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""Those that are worth training on."""


@dataclass(frozen=True)
class Experience:
    name: str  # of the section in the recipe
    section: OnlineConfig
    generate: Remote
    realms: Realms
    judge: Judge | None  # None: the environments on the generate ranks give all rewards

    @property
    def prompts_per_batch(self) -> int:
        """How many prompts are sampled at a time."""
        multiplier = self.section.batch_multiplier if isinstance(self.section, RewardedConfig) else 1
        return int(self.section.num_prompts_per_step * multiplier)

    def collect(
        self, batch: list[Prompt], prompts: PromptStream, select: Select, step: int, sampling: Sampling
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """num_prompts_per_step groups that were selected, and metrics of all that were sampled, beginning with `batch`.

        Fewer groups if the data ends before. Raises RuntimeError if as many batches as the recipe allows do not fill the step.
        """
        wanted = self.section.num_prompts_per_step
        sampled: list[RolloutGroup] = []
        selected: list[RolloutGroup] = []
        batches = 0
        while batch and len(selected) < wanted:
            if batches:
                self._bound(batches, len(selected))
            groups = self.rollout(batch, self.section.num_generations_per_prompt, f"train/{step}", sampling)
            sampled, selected, batches = sampled + groups, selected + select(groups), batches + 1
            batch = prompts.take(self.prompts_per_batch) if len(selected) < wanted else []
        values = rollout_metrics("train", sampled)
        if len(selected) < len(sampled):
            values["train/dynamic_sampling_batches"] = float(batches)
            values["train/dynamic_sampling_discarded"] = float(max(0, len(selected) - wanted))
        if len(selected) >= wanted:
            values["train/selected_reward"] = rollout_metrics("train", selected[:wanted])["train/reward"]
        return selected[:wanted], values

    def _bound(self, batches: int, selected: int) -> None:
        most = getattr(self.section, "dynamic_sampling_max_gen_batches", 1)
        if batches >= most:
            raise RuntimeError(
                f"{self.name}.dynamic_sampling_max_gen_batches: after {batches} batches of {self.prompts_per_batch} prompts"
                f" only {selected} of {self.section.num_prompts_per_step} groups have rewards that vary: the data are too easy"
                f" or too hard for this policy, or {self.name}.num_generations_per_prompt is too small"
            )

    def rollout(self, prompts: list[Prompt], samples: int, purpose: str, sampling: Sampling) -> list[RolloutGroup]:
        """`samples` judged rollouts of each prompt, one group per prompt, in their order."""
        realms = self.realms
        engines = len(realms.engines)
        work = [RolloutWork(i, prompts[i::engines], samples, purpose, self.section.seed, sampling) for i in range(engines)]
        parts = [work[realms.engines.index(realms.engine(rank))] for rank in realms.generate]
        replies = self.generate.rollout(parts=parts).result()
        shares = [reply for rank, reply in zip(realms.generate, replies, strict=True) if rank == realms.engine(rank)[0]]
        groups = [shares[i % engines][i // engines] for i in range(len(prompts))]
        return self.judge(groups) if self.judge else groups
