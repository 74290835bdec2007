"""What the policy has sampled, as sequences to train on."""

from __future__ import annotations

import numpy as np

from pipeline.types import Prompt, Rollout, Sample


def sample(prompt: Prompt, rollout: Rollout, advantage: float, reward: float, counts: bool = True) -> Sample:
    """Prompt and turns, of which what the policy drew counts, each of its tokens with the advantage.

    counts: False if the loss is to leave the sequence out, as it does with one that nobody could judge.
    """
    before = len(prompt.tokens)
    tokens = np.concatenate([prompt.tokens, rollout.tokens]).astype(np.int32)
    mask = np.concatenate([np.zeros(before, np.bool_), rollout.drawn]) & (counts and not rollout.failure)
    logprobs = np.concatenate([np.zeros(before), rollout.logprobs])
    return Sample(
        tokens,
        mask,
        np.where(mask, logprobs, 0).astype(np.float32),
        np.where(mask, advantage, 0).astype(np.float32),
        0.0 if rollout.failure else float(reward),
    )
