"""The matmul floor: how long a step would take if it were nothing but its matrix products, at the rate this CPU sustains.

FLOPs: 2 N a token forward and 6 N a token with the backward pass (https://arxiv.org/abs/2001.08361, section 2.1), N being the
parameters that a token is multiplied with. Generation reads each prompt once, whatever the number of its completions, and each
completion; training takes every token of every sample. Attention (0.1 to 6% here), the optimizer and everything elementwise are
left out.

The rate is measured, on one thread, on the products of one layer of the model: for generation with as many rows as completions
are decoded at once, for training with the number of rows that goes fastest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from tests.benchmarks.cases import Case

_SECONDS = 1.0  # of measuring each rate
_TRAIN_ROWS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Floor:
    """FLOPs of a step, and FLOPs per CPU second."""

    generate_flops: float
    train_flops: float
    generate_rate: float
    train_rate: float

    @property
    def generate(self) -> float:
        """Return CPU seconds of generation."""
        return self.generate_flops / self.generate_rate

    @property
    def train(self) -> float:
        """Return CPU seconds of training."""
        return self.train_flops / self.train_rate


def measure(case: Case) -> Floor:
    prompt_tokens, completion_tokens = case.tokens
    read_once = prompt_tokens // case.generations + completion_tokens
    return Floor(
        generate_flops=2 * case.multiplied * read_once,
        train_flops=6 * case.multiplied * (prompt_tokens + completion_tokens),
        generate_rate=_rate(case, case.samples),
        train_rate=max(_rate(case, rows) for rows in _TRAIN_ROWS),
    )


@torch.inference_mode()
def _rate(case: Case, rows: int) -> float:
    """Return FLOPs per CPU second of the best of many passes through one layer's products."""
    hidden, inner = case.hidden_size, case.intermediate_size
    shapes = [(hidden, hidden)] * 4 + [(hidden, inner)] * 2 + [(inner, hidden)]
    products = [(torch.randn(rows, k), torch.randn(n, k).T, torch.empty(rows, n)) for k, n in shapes]
    flops = sum(2 * rows * k * n for k, n in shapes)
    passes = max(1, int(2e8 // flops))  # long enough for the clock
    best, begun = float("inf"), time.process_time()
    while time.process_time() - begun < _SECONDS:
        start = time.process_time()
        for _ in range(passes):
            for left, right, out in products:
                torch.mm(left, right, out=out)
        best = min(best, time.process_time() - start)
    return passes * flops / best
