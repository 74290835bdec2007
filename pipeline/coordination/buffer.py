"""Choose the groups that a step trains on when sampling runs ahead of training. Pure bookkeeping without communication.

Steps are numbered from 0, and each step trains on P groups. A group is live from its beginning until a step trains on it. A
group sampled by weights of version v must be trained on in step v + k at the latest (its deadline), where k is
`max_trajectory_age_steps`. Let s be the current step and N(d) the number of live groups whose deadline is at most d. All
deadlines can be kept, by training on the group with the earliest deadline first, if and only if N(d) <= P (d - s + 1) for every
d. So for every d, step s must take at least N(d) - P (d - s) of these N(d) groups, and at most P (k + 1) groups may be live. No
group is ever dropped for its age.

`stragglers` is one of:
    wait  P (k + 1) groups are live; a step takes the oldest groups, and waits for them.
    keep  P + P k // 2 groups are live; a step takes the oldest complete groups, and waits only for groups that it must take.
          Later steps train on a straggler like on any other group.
    cut   as wait, but when at most `straggler_share` of the answers that the step needs are in incomplete groups, the
          unfinished answers of these groups are cut at their present length.

Short answers have no advantage, because a step waits for groups, not for answers, and every group that has begun is trained on
exactly once, whenever it completes. `num_groups_to_begin` begins no more groups than the remaining steps will take, so no group
is in progress when the run ends. Only `cut` changes the training data; the cut answers have the finish "length".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.config import AsyncConfig
from pipeline.files.encoding import decode, encode
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Prompt, Rollout, RolloutGroup, VersionSpan


@dataclass(slots=True)
class LiveGroup:
    """A group that has begun and has not been trained on."""

    prompt: Prompt
    begun: int  # version of the weights when it was sent; an engine may begin later, never earlier
    group: RolloutGroup | None = None  # set when all of its episodes have ended
    cut: bool = False  # unfinished episodes were cut


class Buffer:
    """Holds the live groups by the index of their prompt, in the order in which they began, so that deadlines ascend."""

    def __init__(self, config: AsyncConfig, prompts_per_step: int, key: str = "grpo.async_grpo"):
        """Set up a buffer by a section of the recipe. key: the section's dotted key, for messages."""
        self._config, self._key = config, key
        self._size = prompts_per_step
        self._live: dict[int, LiveGroup] = {}

    @property
    def max_age(self) -> int:
        """Maximum number of steps between sampling a group and training on it."""
        return self._config.max_trajectory_age_steps

    @property
    def live(self) -> list[LiveGroup]:
        """Live groups, oldest first."""
        return list(self._live.values())

    @property
    def capacity(self) -> int:
        """Maximum number of groups that may be live at once."""
        if self._config.stragglers == "keep":
            return self._size + self._size * self.max_age // 2
        return self._size * (self.max_age + 1)

    def num_groups_to_begin(self, steps_left: int) -> int:
        """Return how many groups may begin now."""
        return max(0, min(self.capacity, self._size * steps_left) - len(self._live))

    def begin(self, prompts: Iterable[Prompt], version: int) -> None:
        """Add groups that are being sent. Versions must not decrease from call to call."""
        for prompt in prompts:
            if prompt.index in self._live:
                raise ValueError(f"prompt {prompt.index} is in progress already")
            self._live[prompt.index] = LiveGroup(prompt, version)

    def complete(self, group: RolloutGroup) -> None:
        """Store a group all of whose episodes have ended."""
        live = self._live[group.prompt.index]
        if live.group is not None:
            raise ValueError(f"prompt {group.prompt.index} was complete already")
        live.group = group

    def take(self, step: int, count: int) -> list[RolloutGroup] | None:
        """Remove and return the groups that this step trains on; None while the step must wait for a group.

        count: how many groups the step still needs. The result has fewer groups only if fewer are live.
        """
        chosen = self._choice(count)
        if len(chosen) < min(count, len(self._live)) or not self._keeps_deadlines(chosen, step):
            return None
        groups = [live.group for live in chosen if live.group is not None]
        if len(groups) < len(chosen):
            return None
        for group in groups:
            del self._live[group.prompt.index]
        return groups

    def stragglers(self, count: int) -> list[Prompt]:
        """Return the prompts whose groups to cut now so that the step can begin; [] unless the setting is `cut`.

        Each group is returned only once. Groups that replace discarded groups have just begun. They are not cut, because
        `straggler_share` of a few groups is less than one group.
        """
        late = [live for live in self._choice(count) if live.group is None]
        if self._config.stragglers != "cut" or len(late) > self._config.straggler_share * count + 1e-9:
            return []
        fresh = [live for live in late if not live.cut]
        for live in fresh:
            live.cut = True
        return [live.prompt for live in fresh]

    def restore(self, live: Iterable[LiveGroup]) -> None:
        """Replace the live groups by `live`, oldest first, to return to the state before a step that did not train."""
        self._live = {group.prompt.index: group for group in live}

    def check(self, step: int) -> None:
        """Raise RecipeError if no order of training keeps all deadlines, as after a restart with other settings."""
        if not self._keeps_deadlines(self.live[: self._size], step):
            oldest = step - min(live.begun for live in self._live.values())
            message = (
                f"got {self.max_age}, but the checkpoint of step {step} has {len(self._live)} groups, begun up to {oldest}"
                f" steps ago; steps of {self._size} groups cannot train on all of them in time. Try the settings of the"
                " checkpoint, or a larger age"
            )
            raise RecipeError(Problem(f"{self._key}.max_trajectory_age_steps", "run-exists", message))

    def _choice(self, count: int) -> list[LiveGroup]:
        """Return the oldest groups; with `keep`, the oldest complete groups."""
        keep = self._config.stragglers == "keep"
        return [live for live in self._live.values() if live.group is not None or not keep][:count]

    def _keeps_deadlines(self, chosen: list[LiveGroup], step: int) -> bool:
        """Return whether later steps can still keep all deadlines if this step takes `chosen`."""
        by_deadline: dict[int, int] = {}
        for live in self._live.values():
            by_deadline[live.begun + self.max_age] = by_deadline.get(live.begun + self.max_age, 0) + 1
        for live in chosen:
            by_deadline[live.begun + self.max_age] -= 1
        due = 0
        for deadline in sorted(by_deadline):
            due += by_deadline[deadline]
            if due > self._size * (deadline - step):
                return False
        return True


def staleness(groups: Sequence[RolloutGroup], step: int, max_age: int) -> dict[str, float]:
    """Return metrics: mean and highest age of the policy's tokens, and the number of its tokens of each age up to `max_age`.

    The age of a token is the step minus the version of the weights that drew it. A rollout's first token is its oldest, so the
    highest age is also the age of the rollout that began first. Raises RuntimeError if it exceeds `max_age`, which the buffer
    prevents.
    """
    tokens = [0] * (max_age + 1)
    for group in groups:
        for span in (span for rollout in group.rollouts for span in rollout.spans):
            age = step - span.version
            if not 0 <= age <= max_age:
                raise RuntimeError(
                    f"prompt {group.prompt.index}: got tokens of age {age} in step {step}; expected 0 to {max_age}"
                )
            tokens[age] += span.tokens
    total = max(1, sum(tokens))
    return {
        "async/age_mean": sum(age * n for age, n in enumerate(tokens)) / total,
        "async/age_max": float(max((age for age, n in enumerate(tokens) if n), default=0)),
        **{f"async/tokens_age_{age}": float(n) for age, n in enumerate(tokens)},
    }


# ---- checkpoints -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group that has begun and has not been trained on, as stored in a checkpoint's `buffer.msgpack`.

    Unfinished rollouts are sampled again after a restart, because an engine's KV cache is not saved.
    """

    prompt: Prompt
    begun: int  # version of the weights
    rollouts: dict[int, Rollout]  # finished rollouts, by sample
    open: dict[int, list[VersionSpan]]  # drawn spans of the others, by sample; empty if not begun

    @property
    def group(self) -> RolloutGroup | None:
        """The whole group if all its episodes have ended; otherwise None."""
        if self.open:
            return None
        return RolloutGroup(self.prompt, tuple(rollout for _, rollout in sorted(self.rollouts.items())))


def encode_groups(groups: Sequence[SavedGroup]) -> bytes:
    """Return the contents of `buffer.msgpack`; b"" if there are no groups."""
    return encode(list(groups)) if groups else b""


def decode_groups(content: bytes) -> list[SavedGroup]:
    """Return the groups that `encode_groups` wrote. Raises msgspec.ValidationError for anything else."""
    return decode(content, list[SavedGroup]) if content else []


def resumed_metrics(groups: Sequence[SavedGroup]) -> dict[str, float]:
    """Return metrics: the numbers of rollouts that a restart keeps and samples again."""
    open_ = [sum(span.tokens for span in spans) for group in groups for spans in group.open.values()]
    redone = [tokens for tokens in open_ if tokens]
    return {
        "async/resumed_rollouts_kept": float(sum(len(group.rollouts) for group in groups)),
        "async/resumed_rollouts_redone": float(len(redone)),
        "async/resumed_tokens_redone": float(sum(redone)),
        "async/resumed_rollouts_not_begun": float(len(open_) - len(redone)),
    }
