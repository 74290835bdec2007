"""What the policy has sampled, as sequences to train on."""

from __future__ import annotations

import numpy as np

from pipeline.types import Prompt, Rollout, Sample


def sample(prompt: Prompt, rollout: Rollout, advantage: float, reward: float, counts: bool = True) -> Sample:
    """Prompt and completion, of which the completion counts, each of its tokens with the advantage.

    counts: False if the loss is to leave the sequence out.
    """
    completion = rollout.completion
    before = len(prompt.tokens)
    tokens = np.concatenate([prompt.tokens, completion.tokens]).astype(np.int32)
    mask = (np.arange(len(tokens)) >= before) & counts
    logprobs = np.concatenate([np.zeros(before), completion.logprobs])
    return Sample(
        tokens,
        mask,
        np.where(mask, logprobs, 0).astype(np.float32),
        np.where(mask, advantage, 0).astype(np.float32),
        float(reward),
    )
