"""What the loop asks of the gathering of experience, and what is the same of all that is gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pipeline.data.stream import PromptStream
from pipeline.experience.dispatch import Dispatch, Order
from pipeline.metrics import rollout_metrics
from pipeline.types import Prompt, RolloutGroup

Judge = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""Gives groups the rewards that a model gives them."""

Select = Callable[[list[RolloutGroup]], list[RolloutGroup]]
"""Those that are worth training on."""


class Experience(ABC):
    """A step is `send`, `collect`, then learning, `before_refit` and the refit."""

    def __init__(self, prompts_per_step: int, dispatch: Dispatch, judge: Judge | None, train: Order, validation: Order):
        """judge: None if the environments on the generate ranks give all rewards."""
        self.prompts_per_step = prompts_per_step
        self._dispatch = dispatch
        self._judge = judge or list
        self._train, self._validation = train, validation

    @abstractmethod
    def room(self, step: int) -> int:
        """How many prompts are to be sent at the beginning of a step."""

    @abstractmethod
    def enough(self, prompts: Sequence[Prompt]) -> bool:
        """Whether a step can be full if these are sent for it. False only when the data have ended."""

    @abstractmethod
    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        """Have them sampled. step: how many there were, which is the version of the weights."""

    @abstractmethod
    def collect(self, prompts: PromptStream, select: Select, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """prompts_per_step groups that were selected, and metrics of all that were sampled for them; fewer groups if the data
        end. Where groups are not selected, others are sampled of further prompts.

        Raises RuntimeError if as many prompts as the recipe allows do not fill the step.
        """

    def validate(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Judged rollouts of each prompt, one group per prompt, in their order."""
        self._dispatch.send(prompts, self._validation)
        return self._judge(self._dispatch.wait_for(prompts, self._validation.purpose))

    @abstractmethod
    def before_refit(self) -> None:
        """Bring the engines to where their weights can be replaced."""

    @abstractmethod
    def record(self) -> bytes:
        """What a checkpoint must keep: groups that are under way, or complete and not trained on. Empty if there are none."""

    @abstractmethod
    def resume(self, record: bytes, step: int) -> dict[str, float]:
        """Go on with what `record` kept, after the first refit; metrics of it, which it also prints.

        Raises ValueError if that cannot be done with this recipe.
        """

    @property
    @abstractmethod
    def pending(self) -> int:
        """Groups that were sent and not trained on."""


def sampled_metrics(sampled: list[RolloutGroup], selected: list[RolloutGroup], wanted: int, batches: float) -> dict[str, float]:
    """Of all groups that a step sampled, and of those that it trains on. batches: how many prompts it took, in steps' worth."""
    values = rollout_metrics("train", sampled)
    if len(selected) < len(sampled):
        values["train/dynamic_sampling_batches"] = float(batches)
        values["train/dynamic_sampling_discarded"] = float(max(0, len(selected) - wanted))
    if len(selected) >= wanted:
        values["train/selected_reward"] = rollout_metrics("train", selected[:wanted])["train/reward"]
    return values


def refuse_to_go_on(key: str, taken: str, selected: int, wanted: int) -> None:
    """key: the algorithm's section. Raises RuntimeError: dynamic sampling does not fill a step."""
    raise RuntimeError(
        f"{key}.dynamic_sampling_max_gen_batches: after {taken} only {selected} of {wanted} groups have rewards that vary: the"
        f" data are too easy or too hard for this policy, or {key}.num_generations_per_prompt is too small"
    )
