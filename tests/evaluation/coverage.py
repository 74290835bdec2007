"""Simulate how often the 95% intervals hold the true score, and how often comparisons raise a false alarm.

    python -m tests.evaluation.coverage [trials=2000]

Each trial draws questions of a known distribution, and answers to them. A table says for each kind of score in how many trials
the interval holds the mean over all questions; the second one in how many trials two equally good models are called better or
worse, and how often a better one is found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pipeline.evaluation.statistics import difference, interval, macro_interval, pass_at

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""(random numbers, number of questions) -> scores [questions, samples]."""
COVERED = (0.93, 0.97)
FALSE_ALARMS = 0.05
PASS = np.array([*pass_at({str(wrong): [0] * wrong + [1] * (8 - wrong) for wrong in range(9)}, 4).values()])[:, 0]
SHAPES = {"hard": (0.2, 1.8), "even": (1.0, 1.0), "easy": (9.0, 1.0), "all or none": (0.5, 0.5)}
"""Beta distributions of the chance to solve a question."""


@dataclass(frozen=True)
class Case:
    """A kind of score, and the mean over all questions."""

    name: str
    draw: Draw
    mean: float
    sizes: tuple[int, ...] = (30, 100, 500)


def _chances(shape: str, samples: int, shift: float = 0.0) -> Draw:
    """Answers, right or wrong, to questions of a shape. shift: added to the log-odds of each."""

    def draw(rng, n):
        return _answers(rng, rng.beta(*SHAPES[shape], n), samples, shift)

    return draw


def _answers(rng: np.random.Generator, chances: np.ndarray, samples: int, shift: float = 0.0) -> np.ndarray:
    odds = np.exp(shift) * chances / np.maximum(1 - chances, 1e-300)
    return (rng.random((len(chances), samples)) < (odds / (1 + odds))[:, None]).astype(float)


def _passes(shape: str) -> Draw:
    """pass@4 of 8 samples."""
    eight = _chances(shape, 8)
    return lambda rng, n: PASS[(8 - eight(rng, n).sum(axis=1)).astype(int)][:, None]


def _judged(rng: np.random.Generator, n: int) -> np.ndarray:
    """A judge's marks from 1 to 10."""
    return np.clip(np.round(rng.normal(8, 2, (n, 1))), 1, 10)


_MARK = 10 - sum(NormalDist(8, 2).cdf(mark + 0.5) for mark in range(1, 10))
"""Mean of the judge's marks."""


def cases() -> Iterator[Case]:
    """Yield the simulated kinds of scores."""
    for shape, (a, b) in SHAPES.items():
        for samples in (1, 4, 16):
            yield Case(f"right or wrong, {shape}, {samples} samples", _chances(shape, samples), a / (a + b))
    for shape, (a, b) in SHAPES.items():
        yield Case(f"pass@4 of 8, {shape}", _passes(shape), 1 - math.prod((b + i) / (a + b + i) for i in range(4)))
    yield Case("win, tie, loss", lambda rng, n: rng.choice([0.0, 0.5, 1.0], (n, 1), p=[0.3, 0.1, 0.6]), 0.65)
    yield Case("a judge's marks 1 to 10", _judged, _MARK, (30, 100))
    yield Case("log-normal", lambda rng, n: np.exp(rng.normal(0, 0.7, (n, 1))), math.exp(0.245), (30, 100))


def coverage(case: Case, n: int, trials: int, seed: int = 0) -> float:
    """Return the share of trials whose interval holds the mean."""
    rng = np.random.default_rng([seed, n])
    held = 0
    for _ in range(trials):
        found = interval(case.draw(rng, n).tolist())
        held += found.low - 1e-12 <= case.mean <= found.high + 1e-12
    return held / trials


def macro_coverage(trials: int, seed: int = 0) -> float:
    """Return the share of trials whose interval holds the mean of ten subjects of 5 to 50 questions."""
    rng = np.random.default_rng(seed)
    means, sizes = np.linspace(0.3, 0.9, 10), np.linspace(5, 50, 10).astype(int)
    held = 0
    for _ in range(trials):
        groups = [(rng.random((n, 1)) < p).astype(float).tolist() for n, p in zip(sizes, means, strict=True)]
        found = macro_interval(groups)
        held += found.low <= means.mean() <= found.high
    return held / trials


def verdicts(shape: str, samples: int, n: int, trials: int, shift: float = 0.0, seed: int = 0) -> dict[str, float]:
    """Return the share of each verdict on two models whose log-odds to solve a question differ by `shift`."""
    rng = np.random.default_rng([seed, n, samples])
    found: dict[str, int] = {"better": 0, "worse": 0, "cannot tell": 0}
    for _ in range(trials):
        chances = rng.beta(*SHAPES[shape], n)
        pair = [_answers(rng, chances, samples, each) for each in (0.0, shift)]
        first, second = ({str(i): row for i, row in enumerate(answers.tolist())} for answers in pair)
        found[difference(first, second).verdict] += 1
    return {verdict: count / trials for verdict, count in found.items()}


def main(arguments: list[str]) -> int:
    """Print the tables."""
    trials = int(dict(each.split("=") for each in arguments).get("trials", 2000))
    print(f"share of {trials} trials whose 95% interval holds the true score (simulation error: {_error(0.95, trials):.3f})")
    print(f"{'score':44}" + "".join(f"{f'n={n}':>8}" for n in (30, 100, 500)))
    for case in cases():
        print(f"{case.name:44}" + "".join(f"{coverage(case, n, trials):8.3f}" for n in case.sizes), flush=True)
    print(f"{'macro average of 10 subjects':44}{macro_coverage(trials):8.3f}")
    trials //= 2
    print(f"\nshare of {trials} comparisons (simulation error of 0.05: {_error(0.05, trials):.3f})")
    print(f"{'two models':32}{'questions':>10}{'false alarm':>13}{'found, log-odds + 0.8':>24}")
    for shape in SHAPES:
        for samples in (1, 4):
            for n in (30, 100, 500):
                same, better = verdicts(shape, samples, n, trials), verdicts(shape, samples, n, trials // 4, 0.8)
                alarm = f"{1 - same['cannot tell']:13.3f}{better['better']:24.3f}"
                print(f"{f'{shape}, {samples} samples':32}{n:10}{alarm}", flush=True)
    return 0


def _error(share: float, trials: int) -> float:
    """Return the standard error of a share of trials."""
    return math.sqrt(share * (1 - share) / trials)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
