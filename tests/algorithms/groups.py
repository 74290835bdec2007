"""Groups of rollouts for the tests of rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Turn, VersionSpan


def group_of(rewards: Sequence[float], lengths: Sequence[int] | None = None, cut: Sequence[bool] | None = None) -> RolloutGroup:
    """Return answers to the prompt [5, 6], by default of two tokens each and complete."""
    lengths, cut = lengths or [2] * len(rewards), cut or [False] * len(rewards)
    rollouts = []
    for i, (reward, length, is_cut) in enumerate(zip(rewards, lengths, cut, strict=True)):
        tokens = np.arange(7, 7 + length, dtype=np.int32)
        logprobs = -0.1 * np.arange(1, length + 1, dtype=np.float32)
        completion = Completion(f"0/{i}", tokens, logprobs, (VersionSpan(0, length),), "length" if is_cut else "stop")
        rollouts.append(Rollout((Turn(completion),), reward))
    return RolloutGroup(Prompt(0, np.array([5, 6], np.int32), "math", {}), tuple(rollouts))


def group_of_turns(rewards: Sequence[Sequence[float]], malformed: Sequence[Sequence[int]] | None = None) -> RolloutGroup:
    """Return episodes whose turns have these rewards. A turn has two tokens, and each but the last an observation of one."""
    flags, rollouts = malformed or [[0] * len(of_turns) for of_turns in rewards], []
    for of_turns, flawed in zip(rewards, flags, strict=True):
        pairs = zip(of_turns, flawed, strict=True)
        turns = [replace(group_of([0.0]).rollouts[0].turns[0], reward=reward, malformed=bool(flaw)) for reward, flaw in pairs]
        told = [replace(turn, observation=np.array([9], np.int32)) for turn in turns[:-1]]
        rollouts.append(Rollout((*told, *turns[-1:]), sum(of_turns)))
    return replace(group_of([0.0]), rollouts=tuple(rollouts))


def group_of_several(rewards: Sequence[dict[str, float]], environment: str = "math") -> RolloutGroup:
    """Return answers with several rewards each, by name; their reward is the sum."""
    group = group_of([sum(of_answer.values()) for of_answer in rewards])
    rollouts = zip(group.rollouts, rewards, strict=True)
    scored = (replace(rollout, metrics={f"reward/{name}": r for name, r in own.items()}) for rollout, own in rollouts)
    return RolloutGroup(replace(group.prompt, environment=environment), tuple(scored))
