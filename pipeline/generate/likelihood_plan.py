"""Plan the prefixes that an engine computes to score a unit of texts, such that each distinct prefix is computed once.

A token is scored by the hidden state before it, so a text's last token is never an input. The prompts of a unit are its texts
without their last tokens. Prompts are sorted, so that prompts with a common beginning are neighbours, and each distinct prefix
gets a number. So the choices of one question share the states of their context, and choices of one token need only one prompt.
A prompt that is the beginning of another prompt is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.types import Likelihood, LikelihoodRequest


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """Prompts to compute, and the tokens that the state at the end of each prefix scores.

    Worked example, texts [5, 6, 7] and [5, 6, 8, 9], both with first 2: the only prompt is [5, 6, 8], its prefixes have the
    numbers [0, 1, 2], prefix 1 scores 7 and 8, and prefix 2 scores 9. starts is [0, 0, 2, 3] and positions is [0, 1, 2].
    """

    prompts: list[np.ndarray]  # each [P] int32, in lexicographic order
    prefixes: list[np.ndarray]  # each [P] int64: number of the prefix that ends with each token of the prompt
    ends: np.ndarray  # [E] int64: the prefix before each scored token, requests in order
    tokens: np.ndarray  # [E] int64: the scored tokens
    positions: np.ndarray  # [E] int64: indices into `tokens`, sorted by prefix
    starts: np.ndarray  # [prefixes + 1] int64: where each prefix begins in `places`

    def score_indices(self, prefixes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices of the tokens that these prefixes score, index of each token's prefix in `prefixes`)."""
        counts = self.starts[prefixes + 1] - self.starts[prefixes]
        indices = np.repeat(np.arange(len(prefixes)), counts)
        within = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.positions[self.starts[prefixes][indices] + within], indices


def scoring_plan(requests: Sequence[LikelihoodRequest]) -> ScoringPlan:
    """Return the plan that scores a unit of requests."""
    prompts = [np.asarray(request.tokens[:-1], np.int32) for request in requests]
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    prefixes = [np.zeros(0, np.int64)] * len(prompts)
    chosen: list[int] = []
    count, last, last_prefixes = 0, np.zeros(0, np.int32), np.zeros(0, np.int64)
    for i in order:
        shared = _common(last, prompts[i])
        fresh = len(prompts[i]) - shared
        prefixes[i] = np.concatenate([last_prefixes[:shared], np.arange(count, count + fresh)])
        if chosen and shared == len(last):
            chosen.pop()
        chosen.append(i)
        count += fresh
        last, last_prefixes = prompts[i], prefixes[i]
    empty = np.zeros(0, np.int64)
    ends = np.concatenate([empty, *(prefixes[i][request.first - 1 :] for i, request in enumerate(requests))])
    tokens = np.concatenate([empty, *(request.tokens[request.first :] for request in requests)])
    positions = np.argsort(ends, kind="stable")
    starts = np.searchsorted(ends[positions], np.arange(count + 1))
    return ScoringPlan([prompts[i] for i in chosen], [prefixes[i] for i in chosen], ends, tokens, positions, starts)


def split(requests: Sequence[LikelihoodRequest], logprobs: np.ndarray, greedy: np.ndarray) -> list[Likelihood]:
    """Return the likelihood of each request, from the scores of all tokens. logprobs: [E] float32, greedy: [E] bool."""
    bounds = np.cumsum([0, *(len(request.tokens) - request.first for request in requests)])
    parts = zip(requests, bounds, bounds[1:], strict=False)
    return [Likelihood(request.id, logprobs[start:end], greedy[start:end]) for request, start, end in parts]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of leading tokens that `a` and `b` share."""
    shorter = min(len(a), len(b))
    different = a[:shorter] != b[:shorter]
    first = int(different.argmax()) if shorter else 0
    return first if shorter and different[first] else shorter
