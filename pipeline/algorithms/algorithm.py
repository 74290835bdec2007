"""Base classes of algorithms. An algorithm declares its needs and checks the recipe at submission, and computes in the job.

The machine that submits may not have torch. So the file of an algorithm imports torch, and modules that use torch, only inside
the methods that train ranks call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from pipeline.algorithms import custom_loss
from pipeline.recipe.problems import Problem

if TYPE_CHECKING:
    from pipeline.config import Recipe
    from pipeline.types import GlobalCounts, Head, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample

Loss = Callable[["Outputs", "PackedBatch", "GlobalCounts"], "LossOutput"]
"""(a model's outputs with a graph, the batch, the counts of the whole optimizer step) -> this batch's share of the loss."""

Variance = Literal["biased", "unbiased"]
"""The variance that normalization of the advantages sets to 1: `normalization` in pipeline/algorithms/token_advantages.py."""


@dataclass(frozen=True)
class Needs:
    """The inputs that a step of an algorithm needs besides samples, and how it uses them."""

    head: Head = "logprobs"  # output of the model that `policy` describes; "values" for a reward model
    entropy: bool = False  # the entropy of every distribution, in the policy's outputs
    truncated: bool = False  # the policy's log-probs, not the reference's, are those after top_p and top_k
    old: bool = False  # log-probs by the policy before the step's first update
    old_of_first: bool = True  # of all samples; False: the loss of the first update takes its own log-probs, which are the same
    reference: bool = False  # log-probs by the policy as loaded at the start of the run
    mismatched: bool = False  # the KL divergence from the reference on `Algorithm.mismatched`
    critic: bool = False  # a second model, `value` in the recipe; its values before the first update
    teacher_top_k: int = 0  # number of most likely tokens of frozen models, `teacher` or `on_policy_distillation`
    teacher_logprobs: bool = False  # log-probs of the sampled tokens by these models
    own_top_k: bool = False  # teachers read the answers' text, and the policy's own most likely tokens are compared with theirs
    top_entropy: float = 1.0  # share of an update's counted tokens that keep their advantages: `keep_high_entropy`
    estimates: bool = False  # train ranks compute advantages from the above: `OnlineAlgorithm.estimate`
    standardized: Variance | None = None  # standardize advantages over the step's counted tokens afterwards
    epochs: int = 1  # passes over the samples of a step
    schedule_every_epoch: bool = False  # learning-rate schedules advance after each epoch, not only after the last

    @property
    def has_teachers(self) -> bool:
        """Return whether frozen teachers score the samples."""
        return self.teacher_top_k > 0 or self.teacher_logprobs


class Algorithm:
    """The algorithm of one recipe. This class learns from a data set; `OnlineAlgorithm` learns from what the policy samples.

    An algorithm does not depend on a backend. It reads samples, packed batches and the outputs of models. `CLASSES`
    (`pipeline/algorithms/__init__.py`) names all algorithms.
    """

    Section: ClassVar[type[Any]]  # the recipe's section of the algorithm's name
    reads: ClassVar[tuple[str, ...]] = ()  # other keys or sections of the recipe that only some algorithms read
    trains_model: ClassVar[bool] = True  # whether the job has train ranks
    paired: ClassVar[bool] = False  # whether an example is a chosen and a rejected answer
    labeled: ClassVar[bool] = False  # whether an example is an answer that is labeled good or bad
    needs: Needs = Needs()
    runs_ahead: bool = False  # whether engines sample while the train ranks learn
    updates_per_epoch: int = 1  # optimizer updates of one pass over the samples of a step

    def __init__(self, recipe: Recipe):
        """Bind the algorithm to a recipe."""
        self.recipe, self.name = recipe, recipe.algorithm
        self.section: Any = getattr(recipe, recipe.algorithm)  # a `Section`

    @property
    def sequences_per_item(self) -> int:
        """Number of consecutive samples that form one item of policy.train_global_batch_size and share a microbatch."""
        return 2 if self.paired else 1

    @property
    def samples_per_step(self) -> int:
        """Number of samples that one step trains on, over all ranks."""
        return self.recipe.policy.train_global_batch_size * self.sequences_per_item

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates that a step makes of each model that learns."""
        return self.updates_per_epoch * self.needs.epochs

    @property
    def old_share(self) -> float:
        """Share of a step's samples whose old log-probs a forward pass computes before the first update."""
        if not self.needs.old:
            return 0.0
        return 1.0 if self.needs.old_of_first else 1 - 1 / self.updates_per_step

    @property
    def advances_per_step(self) -> int:
        """Number of times that a step advances the learning-rate schedules of the models that learn in it."""
        return self.needs.epochs if self.needs.schedule_every_epoch else 1

    @property
    def losses(self) -> Mapping[str, Loss]:
        """Name of a model that learns ("policy", "critic") -> its loss."""
        return {"policy": self.policy_loss}

    @property
    def policy_loss(self) -> Loss:
        """The user's loss if the recipe names one (loss_fn.custom), else `loss`."""
        return custom_loss.of_recipe(self.recipe.loss_fn) or self.loss

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        """Return this batch's share of the policy's loss and of its metrics."""
        raise NotImplementedError

    def mismatched(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples, as many as `samples`, on which a step measures the policy's KL. Called if `needs.mismatched`."""
        raise NotImplementedError

    def problems(self) -> Iterator[Problem]:
        """Yield contradictions among the values of the recipe that this algorithm reads."""
        yield from ()


class PairedAlgorithm(Algorithm):
    """Base of algorithms that learn from pairs of a chosen and a rejected answer. A pair shares a microbatch."""

    paired = True
    reads = ("data.learn_prefilled", "plan.longest_tokens")

    @override
    def problems(self) -> Iterator[Problem]:
        packing, longest = self.recipe.policy.sequence_packing, self.recipe.policy.max_total_sequence_length
        for key in ("train_mb_tokens", "logprob_mb_tokens") if packing.enabled else ():
            if (tokens := getattr(packing, key)) is not None and tokens < 2 * longest:
                message = f"got {tokens}; expected at least {2 * longest}, twice policy.max_total_sequence_length, for a pair"
                yield Problem(f"policy.sequence_packing.{key}", "too-small", message)


class OnlineAlgorithm(Algorithm):
    """Base of algorithms that learn from rollouts."""

    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups to train on. If they are too few for the step, the loop samples more groups."""
        return groups

    def compute_advantages(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Return one sample per rollout, in order, with advantages computed from the rewards."""
        raise NotImplementedError

    def estimate(self, batch: PackedBatch) -> PackedBatch:
        """Return a copy of the batch with advantages (not yet standardized), returns and mask. Called if `needs.estimates`."""
        return batch

    def trains(self, step: int) -> tuple[str, ...]:
        """Return the names in `losses` of the models that learn in the step after `step` completed steps."""
        return ("policy",)

    @property
    @override
    def samples_per_step(self) -> int:
        return self.section.num_prompts_per_step * self.section.num_generations_per_prompt

    @property
    @override
    def updates_per_epoch(self) -> int:
        return max(1, self.samples_per_step // self.recipe.policy.train_global_batch_size)

    @override
    def problems(self) -> Iterator[Problem]:
        samples, size = self.samples_per_step, self.recipe.policy.train_global_batch_size
        if samples % size:
            factors = f"{self.name}.num_prompts_per_step x {self.name}.num_generations_per_prompt"
            message = f"got {size}; expected a divisor of {samples} ({factors}). Try {samples}, which makes one update per step"
            yield Problem("policy.train_global_batch_size", "not-divisible", message)
