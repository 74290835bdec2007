"""Choose the groups that a step trains on where sampling runs ahead. Pure: it is told what happened, and sends nothing.

Step s is the one that s others came before; it trains on P groups. A group that weights of version v began must be trained on
in step v + k at the latest (its deadline), k being `max_trajectory_age_steps`. With N(d) the groups alive whose deadline is at
most d, all deadlines can be kept if and only if N(d) <= P (d - s + 1) for every d, by taking the earliest first. So step s must
take at least N(d) - P (d - s) of them for every d, and at most P (k + 1) groups may live. Nothing is ever given up for its age.

    wait  P (k + 1) groups live; a step takes the oldest, and waits for them.
    keep  P + P k // 2 live; a step takes the oldest that are complete, and waits only for those that it must take. A straggler
          is carried over to later steps: it is late, but is trained on like all others.
    cut   as wait, but once at most `straggler_share` of the answers that the step lacks are in groups that are not complete,
          what has not ended of these is cut where it is.

Why short answers have no advantage: a step waits for groups, not for answers, and each group that was begun is trained on once,
whenever it completes. `num_groups_to_begin` lets no more groups begin than the steps that are left will take, so that none
are under way when the run ends. Only `cut` changes what is learned from, and says so by the answers' finish "length".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.config import AsyncConfig
from pipeline.encoding import decode, encode
from pipeline.types import Prompt, Rollout, RolloutGroup, VersionSpan


@dataclass(slots=True)
class LiveGroup:
    """A group that was begun and not yet trained on."""

    prompt: Prompt
    begun: int  # the version of the weights when it was sent; an engine may get to it later, never earlier
    group: RolloutGroup | None = None  # once all of its episodes have ended
    cut: bool = False  # what had not ended of it was


class Buffer:
    """Groups by their prompt's index, in the order in which they were begun, so that deadlines never fall."""

    def __init__(self, config: AsyncConfig, prompts_per_step: int):
        self._config = config
        self._size = prompts_per_step
        self._live: dict[int, LiveGroup] = {}

    @property
    def max_age(self) -> int:
        return self._config.max_trajectory_age_steps

    @property
    def live(self) -> list[LiveGroup]:
        """The live groups, oldest first."""
        return list(self._live.values())

    @property
    def capacity(self) -> int:
        """The number of groups that may live at once."""
        if self._config.stragglers == "keep":
            return self._size + self._size * self.max_age // 2
        return self._size * (self.max_age + 1)

    def num_groups_to_begin(self, steps_left: int) -> int:
        """Return how many groups may begin now."""
        return max(0, min(self.capacity, self._size * steps_left) - len(self._live))

    def begin(self, prompts: Iterable[Prompt], version: int) -> None:
        """Add groups that are sent now; versions do not fall from call to call."""
        for prompt in prompts:
            if prompt.index in self._live:
                raise ValueError(f"prompt {prompt.index} is under way already")
            self._live[prompt.index] = LiveGroup(prompt, version)

    def complete(self, group: RolloutGroup) -> None:
        live = self._live[group.prompt.index]
        if live.group is not None:
            raise ValueError(f"prompt {group.prompt.index} was complete already")
        live.group = group

    def take(self, step: int, wanted: int) -> list[RolloutGroup] | None:
        """Return the groups that this step is to train on, which live no longer; None while it must wait for one. wanted: how
        many it lacks. Fewer only where fewer live."""
        chosen = self._choice(wanted)
        if len(chosen) < min(wanted, len(self._live)) or not self._keeps_deadlines(chosen, step):
            return None
        groups = [live.group for live in chosen if live.group is not None]
        if len(groups) < len(chosen):
            return None
        for group in groups:
            del self._live[group.prompt.index]
        return groups

    def stragglers(self, wanted: int) -> list[Prompt]:
        """With `cut`, return what is to be cut now so that the step can begin; each group once. The few that replace what was
        passed over have just begun: a share of them is less than one, so that they are not cut."""
        late = [live for live in self._choice(wanted) if live.group is None]
        if self._config.stragglers != "cut" or len(late) > self._config.straggler_share * wanted + 1e-9:
            return []
        fresh = [live for live in late if not live.cut]
        for live in fresh:
            live.cut = True
        return [live.prompt for live in fresh]

    def restore(self, live: Iterable[LiveGroup]) -> None:
        """Put back groups that were taken, and not trained on; no others live. Oldest first."""
        self._live = {one.prompt.index: one for one in live}

    def check(self, step: int) -> None:
        """Raises ValueError if no order of training keeps all deadlines, as after a restart with other settings."""
        if not self._keeps_deadlines(self.live[: self._size], step):
            oldest = step - min(live.begun for live in self._live.values())
            raise ValueError(
                f"grpo.async_grpo.max_trajectory_age_steps: the checkpoint of step {step} has {len(self._live)} groups, begun"
                f" up to {oldest} steps ago; steps of {self._size} groups cannot train on all of them before they are older"
                f" than {self.max_age}; the settings that it was written with, or a larger age"
            )

    def _choice(self, wanted: int) -> list[LiveGroup]:
        """Return the oldest groups; with `keep`, of the complete ones."""
        keep = self._config.stragglers == "keep"
        return [live for live in self._live.values() if live.group is not None or not keep][:wanted]

    def _keeps_deadlines(self, chosen: list[LiveGroup], step: int) -> bool:
        """Return whether later steps can still keep all deadlines if this one takes `chosen`."""
        left: dict[int, int] = {}
        for live in self._live.values():
            left[live.begun + self.max_age] = left.get(live.begun + self.max_age, 0) + 1
        for live in chosen:
            left[live.begun + self.max_age] -= 1
        due = 0
        for deadline in sorted(left):
            due += left[deadline]
            if due > self._size * (deadline - step):
                return False
        return True


def staleness(groups: Sequence[RolloutGroup], step: int, max_age: int) -> dict[str, float]:
    """Return mean and highest age over the tokens that the policy drew, and how many tokens have each age up to `max_age`.

    The age of a token is the step, less the version of the weights that drew it. A rollout's first token is its oldest, so the
    highest age is also that of the rollout that was begun first. Raises RuntimeError if it is above `max_age`, which the buffer
    does not let happen.
    """
    tokens = [0] * (max_age + 1)
    for group in groups:
        for span in (span for rollout in group.rollouts for span in rollout.spans):
            age = step - span.version
            if not 0 <= age <= max_age:
                raise RuntimeError(f"prompt {group.prompt.index}: tokens of version {span.version} came to step {step}")
            tokens[age] += span.tokens
    drawn = max(1, sum(tokens))
    return {
        "async/age_mean": sum(age * n for age, n in enumerate(tokens)) / drawn,
        "async/age_max": float(max((age for age, n in enumerate(tokens) if n), default=0)),
        **{f"async/tokens_age_{age}": float(n) for age, n in enumerate(tokens)},
    }


# ---- checkpoints -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group that was begun and not trained on, as `buffer.msgpack` of a checkpoint has it.

    Rollouts that had not ended are drawn anew after a restart: an engine's keys and values are not saved.
    """

    prompt: Prompt
    begun: int  # the version of the weights
    rollouts: dict[int, Rollout]  # by sample: those that have ended
    open: dict[int, list[VersionSpan]]  # by sample: what had been drawn of the others; empty if they had not begun

    @property
    def group(self) -> RolloutGroup | None:
        """The whole group, if all its episodes have ended."""
        if self.open:
            return None
        return RolloutGroup(self.prompt, tuple(rollout for _, rollout in sorted(self.rollouts.items())))


def encode_groups(groups: Sequence[SavedGroup]) -> bytes:
    return encode(list(groups)) if groups else b""


def decode_groups(content: bytes) -> list[SavedGroup]:
    """Return the groups that `encode_groups` wrote. Raises msgspec.ValidationError for anything else."""
    return decode(content, list[SavedGroup]) if content else []


def resumed_metrics(groups: Sequence[SavedGroup]) -> dict[str, float]:
    """Return what a restart keeps and what it does again."""
    open_ = [sum(span.tokens for span in spans) for saved in groups for spans in saved.open.values()]
    redone = [tokens for tokens in open_ if tokens]
    return {
        "async/resumed_rollouts_kept": float(sum(len(saved.rollouts) for saved in groups)),
        "async/resumed_rollouts_redone": float(len(redone)),
        "async/resumed_tokens_redone": float(sum(redone)),
        "async/resumed_rollouts_not_begun": float(len(open_) - len(redone)),
    }
