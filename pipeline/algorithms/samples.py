"""What the policy has sampled, as sequences to train on."""

from __future__ import annotations

import numpy as np

from pipeline.types import Prompt, Rollout, Sample


def sample(prompt: Prompt, rollout: Rollout, advantage: float, reward: float, counts: bool = True) -> Sample:
    """Prompt and turns, of which what the policy drew counts, each of its tokens with the advantage.

    counts: False if the loss is to leave the sequence out, as it does with one that nobody could judge.
    """
    at, learned = len(prompt.tokens), counts and not rollout.failure
    length = at + sum(len(turn.completion.tokens) + len(turn.observation) for turn in rollout.turns)
    tokens, mask = np.empty(length, np.int32), np.zeros(length, np.bool_)
    logprobs, advantages = np.zeros(length, np.float32), np.zeros(length, np.float32)
    tokens[:at] = prompt.tokens
    for turn in rollout.turns:
        said, told = turn.completion.tokens, turn.observation
        drawn = slice(at, at + len(said))
        tokens[drawn] = said
        if learned:
            mask[drawn], logprobs[drawn], advantages[drawn] = True, turn.completion.logprobs, advantage
        at += len(said) + len(told)
        tokens[at - len(told) : at] = told
    return Sample(tokens, mask, logprobs, advantages, 0.0 if rollout.failure else float(reward))
