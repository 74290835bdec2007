"""Requests from rank 0 to an engine or a reward model, and their replies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.types import Prompt, Rollout, RolloutGroup, Sampling, VersionSpan


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """A request for groups of episodes on an engine. `group_index` is a group's index in `prompts`."""

    number: int  # unique in a run
    prompts: list[Prompt]
    samples: int  # episodes per prompt
    purpose: str  # "train" or "val"; part of every seed
    seed: int  # seed of the run
    sampling: Sampling
    max_turns: int = 1
    urgent: bool = False  # its episodes begin before those of other works
    finished: dict[int, dict[int, Rollout]] = field(
        default_factory=dict
    )  # group index -> sample -> rollout that need not be sampled again
    step: int = 0  # completed training steps when the work was first sent, which reward functions may read


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A complete group: all its episodes have ended."""

    group_index: int
    group: RolloutGroup


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """The state of a group with episodes that have not ended."""

    number: int  # number of the work
    group_index: int
    finished: dict[int, Rollout]  # by sample
    open: dict[int, list[VersionSpan]]  # by sample that has not ended: its drawn spans; [] if not begun


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Sequences that a data-parallel rank scores. All of these ranks have equally many microbatches; some may be empty."""

    microbatches: list[list[np.ndarray]]  # of sequences [L] int32
