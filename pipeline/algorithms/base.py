"""The base classes of algorithms: what one declares and checks at submission, and what it computes in the job.

torch may not be installed where a job is submitted. So the file of an algorithm imports it, and the modules of the mathematics,
inside the methods that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.algorithms.sections import OfflineConfig, OnlineConfig
from pipeline.problems import Problem

if TYPE_CHECKING:
    from pipeline.types import GlobalCounts, Head, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample

Loss = Callable[["Outputs", "PackedBatch", "GlobalCounts"], "LossOutput"]
"""(a model's outputs with a graph, the batch, the whole optimizer step's counts) -> this batch's share of the loss."""

Variance = Literal["biased", "unbiased"]
"""Which variance of the advantages becomes 1: `normalization` in pipeline/algorithms/advantages.py."""


@dataclass(frozen=True)
class Needs:
    """The needs of a step besides samples."""

    head: Head = "logprobs"  # of the model that `policy` describes; a reward model has "values"
    entropy: bool = False  # of every distribution, in the policy's outputs
    truncated: bool = False  # the policy's log-probs, but not the reference's, are of what top_p and top_k leave
    old: bool = False  # log-probs by the policy as it is before the first update
    reference: bool = False  # log-probs by the policy as it was loaded at the start of the run
    critic: bool = False  # a second model, `value` in the recipe; its values before the first update
    teacher_top_k: int = 0  # so many of the most likely tokens of a frozen model, `teacher` in the recipe
    estimates: bool = False  # advantages are made on the train ranks, from the above: `OnlineAlgorithm.estimate`
    standardized: Variance | None = None  # they then get mean 0 and variance 1 over the step's counted tokens
    epochs: int = 1  # passes over the samples of a step
    schedule_every_epoch: bool = False  # schedules advance after each of them, not only after the last


class Algorithm:
    """An algorithm of one recipe. This class itself learns from a data set, `OnlineAlgorithm` from what the policy samples.

    An algorithm knows no backend: it sees samples, packed batches, and models' outputs.
    """

    Section: ClassVar[type[OnlineConfig | OfflineConfig]]  # the recipe's section of the algorithm's name
    reads: ClassVar[tuple[str, ...]] = ()  # further keys or sections of the recipe that not all algorithms read
    paired: ClassVar[bool] = False  # whether an example is a chosen and a rejected answer
    needs: Needs = Needs()
    runs_ahead: bool = False  # whether engines sample while the train ranks learn
    updates_per_epoch: int = 1  # optimizer updates of one pass over the samples of a step

    def __init__(self, recipe: Any):
        """recipe: a `pipeline.config.Recipe`, which is made of the algorithms' sections among others."""
        self.recipe, self.name = recipe, recipe.algorithm
        self.section = getattr(recipe, recipe.algorithm)

    @property
    def sequences_per_item(self) -> int:
        """The number of successive samples that make one of policy.train_global_batch_size, and share a microbatch."""
        return 2 if self.paired else 1

    @property
    def samples_per_step(self) -> int:
        return self.recipe.policy.train_global_batch_size * self.sequences_per_item

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a model that learns in a step."""
        return self.updates_per_epoch * self.needs.epochs

    @property
    def advances_per_step(self) -> int:
        """The number of times that a step advances the schedules of the models that learn in it."""
        return self.needs.epochs if self.needs.schedule_every_epoch else 1

    @property
    def losses(self) -> Mapping[str, Loss]:
        """The losses by the model that is trained: "policy", "critic"."""
        return {"policy": self.loss}

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        """Return this batch's share of the policy's loss and of its metrics."""
        raise NotImplementedError

    def problems(self) -> Iterator[Problem]:
        """Yield what the recipe's values say against each other, as far as this algorithm reads them."""
        yield from ()


class PairedAlgorithm(Algorithm):
    """An algorithm that learns from pairs of a chosen and a rejected answer, which go through the model together."""

    paired = True

    def problems(self) -> Iterator[Problem]:
        packing, longest = self.recipe.policy.sequence_packing, self.recipe.policy.max_total_sequence_length
        for key in ("train_mb_tokens", "logprob_mb_tokens") if packing.enabled else ():
            if (tokens := getattr(packing, key)) < 2 * longest:
                told = f"got {tokens}; expected at least {2 * longest}, two of policy.max_total_sequence_length for a pair"
                yield Problem(f"policy.sequence_packing.{key}", "too-small", told)


class OnlineAlgorithm(Algorithm):
    """An algorithm that learns from rollouts."""

    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups that are worth training on. If these are not all, the loop samples until a step is full."""
        return groups

    def compute_advantages(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Return one sample per rollout, in order, with advantages made of the rewards."""
        raise NotImplementedError

    def estimate(self, batch: PackedBatch) -> PackedBatch:
        """With `needs.estimates`, return the batch with its advantages (not yet standardized), returns and mask. Pure."""
        return batch

    def trains(self, step: int) -> tuple[str, ...]:
        """Return which of the models in `losses` learn in the step that comes after `step` others."""
        return ("policy",)

    @property
    def samples_per_step(self) -> int:
        return self.section.num_prompts_per_step * self.section.num_generations_per_prompt

    @property
    def updates_per_epoch(self) -> int:
        return max(1, self.samples_per_step // self.recipe.policy.train_global_batch_size)

    def problems(self) -> Iterator[Problem]:
        samples, size = self.samples_per_step, self.recipe.policy.train_global_batch_size
        if samples % size:
            factors = f"{self.name}.num_prompts_per_step x {self.name}.num_generations_per_prompt"
            told = f"got {size}; expected a divisor of {samples} ({factors}). Try {samples}, which makes one update per step"
            yield Problem("policy.train_global_batch_size", "not-divisible", told)
