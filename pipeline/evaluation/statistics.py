"""95% intervals of scores, and paired comparisons of two evaluations of the same questions.

Questions are the unit: they are a sample of all questions that the task could ask, and several answers of one question are one
cluster. Each question weighs the same in a score, whatever its number of samples.

    scores in [0, 1]   Wilson's interval with the effective sample size p (1 - p) / variance of the mean
    other scores       bootstrap over questions, widened for small samples
    with a Scale       the same after a map to [0, 1], or to logarithms: no end is a value that the score cannot have
    pairs              Wilson's interval of (1 + difference) / 2 for scores in [0, 1], otherwise bootstrap over the questions'
                       differences; McNemar's mid-p where each question has one answer, right or wrong, otherwise a
                       randomization test that swaps the two evaluations question by question

`python -m tests.evaluation.coverage` measures the coverage of the intervals and the false alarms of the comparisons.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np

LEVEL = 0.95
ALPHA = 1 - LEVEL
UPPER = 1 - ALPHA / 2
Z = NormalDist().inv_cdf(UPPER)
RESAMPLES = 2000
"""Resamples of a bootstrap, and swaps of a randomization test."""
SEED = 20_000
CHUNK = 1 << 21
"""Random numbers drawn at once."""

Verdict = Literal["better", "worse", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A score with its 95% interval. NaN stands for an end that cannot be known, as of a single real-valued question."""

    value: float
    low: float
    high: float


UNKNOWN = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Scale:
    """The values that a score can have. Its questions may have other values: weighted values, or a quotient's linearization."""

    low: float
    high: float = math.inf
    exponential: bool = False  # the score is exp(a mean), as a perplexity is


SHARE = Scale(0.0, 1.0)


# ---- one evaluation ---------------------------------------------------------------------------------------------------------


def interval(questions: Collection[Sequence[float]], scale: Scale | None = None) -> Interval:
    """Return the mean over questions of the mean over their samples. Questions without a sample are left out."""
    samples = [values for values in questions if len(values)]
    if scale is not None and samples:
        return _scale_interval(samples, scale)
    means = np.sort(np.array([_mean(values) for values in samples]))
    n = len(means)
    if not n:
        return UNKNOWN
    p = _mean(means)
    if means[0] < 0 or means[-1] > 1:
        return _bootstrap(means)
    answers = sum(map(len, samples))
    binary = all(value in (0, 1) for values in samples for value in values)
    if binary and answers == n:  # the variance follows from p
        return _wilson(p, n, n, None)
    return _wilson(p, n, min(n * _smoothed_ratio(means), answers if binary else math.inf), max(1, n - 1))


def _scale_interval(samples: Sequence[Sequence[float]], scale: Scale) -> Interval:
    if scale.exponential and (middle := _mean([_mean(values) for values in samples])) > 0:
        # The values are middle (1 + x - mean of x) of x in nats (`pipeline/evaluation/perplexity.py`).
        inner = interval([[math.log(middle) + value / middle - 1 for value in values] for values in samples])
        return _within(scale, Interval(middle, _exp(inner.low), _exp(inner.high)))
    if math.isinf(scale.high):
        return _within(scale, interval(samples))
    width = scale.high - scale.low
    shares = [[(value - scale.low) / width for value in values] for values in samples]
    means = np.sort(np.array([_mean(values) for values in shares]))
    p, variance = _mean(means), _variance(means)
    if means[0] >= 0 and means[-1] <= 1:
        inner = interval(shares)
    elif len(means) == 1 or not variance or not 0 < p < 1:
        inner = Interval(p, math.nan, math.nan) if len(means) == 1 or variance else Interval(p, p, p)
    else:  # weighted questions, or those of a quotient
        inner = _wilson(p, len(means), p * (1 - p) / variance, len(means) - 1)
    return Interval(*(scale.low + width * end for end in (inner.value, inner.low, inner.high)))


def _within(scale: Scale, estimate: Interval) -> Interval:
    """Return an interval whose ends are values of the scale. A NaN stays."""
    low, high = estimate.low, estimate.high
    return Interval(estimate.value, scale.low if low < scale.low else low, scale.high if high > scale.high else high)


def _exp(nats: float) -> float:
    """Return e**nats; NaN above the largest float."""
    return math.exp(nats) if nats < 709 else math.nan


def macro_interval(groups: Collection[Collection[Sequence[float]]], scale: Scale | None = None) -> Interval:
    """Return the mean over groups of each group's mean over questions."""
    estimate = _macro_interval(groups)
    if scale is None:
        return estimate
    if scale.exponential and estimate.value > 0:  # the same relative error in logarithms
        low, high = (estimate.value * _exp((end - estimate.value) / estimate.value) for end in (estimate.low, estimate.high))
        estimate = Interval(estimate.value, low, high)
    return _within(scale, estimate)


def _macro_interval(groups: Collection[Collection[Sequence[float]]]) -> Interval:
    group_means = [np.sort(np.array([_mean(values) for values in group if len(values)])) for group in groups]
    group_means = [means for means in group_means if len(means)]
    freedom = sum(len(means) - 1 for means in group_means)
    if not freedom:
        return interval([[mean] for means in group_means for mean in means.tolist()])
    value = _mean([_mean(means) for means in group_means])
    # A group of one question takes the variance within all groups.
    within = math.fsum(_variance(means) * len(means) * (len(means) - 1) for means in group_means) / freedom
    parts = [(_variance(means) if len(means) > 1 else within) / len(group_means) ** 2 for means in group_means]
    variance = math.fsum(parts)
    if variance:  # Welch and Satterthwaite's degrees of freedom
        squares = math.fsum(part**2 / max(1, len(means) - 1) for part, means in zip(parts, group_means, strict=True))
        freedom = min(freedom, variance**2 / squares)
    if all(means[0] >= 0 and means[-1] <= 1 for means in group_means):
        effective = value * (1 - value) / variance if variance else sum(map(len, group_means))
        return _wilson(value, sum(map(len, group_means)), effective, freedom)
    half = t_quantile(freedom) * math.sqrt(variance)
    return Interval(value, value - half, value + half)


def pass_at(scores: Mapping[str, Sequence[float]], k: int) -> dict[str, list[float]]:
    """Return pass@k by question: the chance that of k of its samples, drawn without replacement, at least one scores 1.

    Unbiased (Chen et al., 2021, arXiv:2107.03374). Questions with fewer than k judged samples are left out.
    """
    chances = {}
    for question, values in scores.items():
        if len(values) >= k:
            wrong = sum(value < 1 for value in values)
            chances[question] = [1.0 - math.comb(wrong, k) / math.comb(len(values), k)]
    return chances


# ---- two evaluations of the same questions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The score of the second of two evaluations minus that of the first, over the questions that both have.

    The ends are NaN without an interval, as of a single question.
    """

    value: float
    low: float
    high: float
    p_value: float
    questions: int
    gained: int  # questions that the second evaluation does better
    lost: int
    lower_is_better: bool = False

    @property
    def shown(self) -> str:
        """The difference with its interval, "-" without one, for people."""
        ends = "-" if math.isnan(self.low) or math.isnan(self.high) else f"{self.low:+.4f}, {self.high:+.4f}"
        return f"{self.value:+.4f} [{ends}]"

    @property
    def verdict(self) -> Verdict:
        """The second evaluation is better or worse if both the interval and the test say so, else one cannot tell."""
        if self.p_value < ALPHA and (self.low > 0 or self.high < 0):
            return "better" if (self.value > 0) != self.lower_is_better else "worse"
        return "cannot tell"


def difference(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    lower_is_better: bool = False,
    exponential: bool = False,
) -> Difference:
    """Compare the values of two evaluations by question id. Questions that only one has are left out.

    exponential: as `Scale.exponential`. The logarithms are compared; the ends are those of their difference, from the first
    score on.
    """
    if exponential:
        return _exponential_difference(first, second, lower_is_better)
    shared = sorted(question for question in first.keys() & second.keys() if len(first[question]) and len(second[question]))
    if not shared:
        return Difference(math.nan, math.nan, math.nan, 1.0, 0, 0, 0, lower_is_better)
    means = np.array([_mean(second[question]) - _mean(first[question]) for question in shared])
    higher, lower = int((means > 0).sum()), int((means < 0).sum())
    gained, lost = (lower, higher) if lower_is_better else (higher, lower)
    scores = [value for question in shared for values in (first[question], second[question]) for value in values]
    estimate = _bounded_difference(means) if min(scores) >= 0 and max(scores) <= 1 else _bootstrap(means)
    p_value = mcnemar(gained, lost) if set(np.abs(means).tolist()) <= {0.0, 1.0} else _swap_test(means)
    return Difference(estimate.value, estimate.low, estimate.high, p_value, len(shared), gained, lost, lower_is_better)


def _exponential_difference(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], lower_is_better: bool
) -> Difference:
    shared = [question for question in first if len(first[question]) and len(second.get(question, ()))]
    if not shared:
        return difference({}, {}, lower_is_better=lower_is_better)
    # The scores are of all questions of an evaluation, which their values' mean over the shared ones only approximates.
    scores = [_mean([_mean(values) for values in evaluation.values() if len(values)]) for evaluation in (first, second)]
    if min(scores) <= 0:  # no quotients
        return difference(first, second, lower_is_better)
    nats = [
        {question: [math.log(score) + value / score - 1 for value in evaluation[question]] for question in shared}
        for evaluation, score in zip((first, second), scores, strict=True)
    ]
    estimate = difference(nats[0], nats[1], lower_is_better)
    value, low, high = (scores[0] * (_exp(end) - 1) for end in (estimate.value, estimate.low, estimate.high))
    return replace(estimate, value=value, low=low, high=high)


def mcnemar(gained: int, lost: int) -> float:
    """Return McNemar's mid-p: the two-sided binomial probability of the changed answers, with half of the outcome's own."""
    count, fewer = gained + lost, min(gained, lost)
    logs = [math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in range(fewer + 1)]
    chances = [math.exp(log - count * math.log(2)) for log in logs]
    return min(1.0, 2 * math.fsum(chances) - chances[-1])


def _swap_test(means: np.ndarray) -> float:
    """Return the chance of as large a sum of differences [n] if each question's two scores were swapped at random."""
    changed = means[means != 0]
    least, rng, extreme = abs(math.fsum(changed)) - 1e-9, np.random.default_rng(SEED), 0
    rows = max(1, CHUNK // max(1, len(changed)))
    for begin in range(0, RESAMPLES, rows):
        signs = 2.0 * rng.integers(0, 2, (min(rows, RESAMPLES - begin), len(changed)), dtype=np.int8) - 1
        extreme += int((np.abs((signs * changed).sum(axis=1)) >= least).sum())
    return (extreme + 1) / (RESAMPLES + 1)


# ---- parts ------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def t_quantile(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t, to 1e-10 of itself, for any number of degrees of freedom from 0.1 on.

    With x = freedom / (freedom + t^2), P(|T| > t) is the regularized incomplete beta function I_x(freedom / 2, 1 / 2). The
    quantile follows by bisection of log t.
    """
    low, high = math.log(Z) - 1e-9, math.log(1e20)  # t is above z, and about 7e12 at 0.1 degrees
    while (middle := (low + high) / 2) not in (low, high):
        tail = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + math.exp(2 * middle)))
        low, high = (middle, high) if tail > ALPHA else (low, middle)
    return math.exp(middle)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return I_x(a, b) for x in [0, 1] by its continued fraction (DLMF 8.17.22), evaluated as Lentz does."""
    if x > (a + 1) / (a + b + 2):  # where the fraction of the other side converges fast
        return 1 - _incomplete_beta(b, a, 1 - x)
    tiny, c, d, fraction = 1e-300, 1.0, 0.0, 1.0
    for step in range(2000):
        half = step // 2
        if step == 0:
            part = 1.0
        elif step % 2 == 0:
            part = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        else:
            part = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        d = 1 / (1 + part * d or tiny)
        c = 1 + part / c or tiny
        fraction *= c * d
        if step and abs(c * d - 1) < 1e-15:
            break
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) if x else -math.inf
    return math.exp(log_front) * (fraction - 1) / a if x else 0.0


def _wilson(p: float, questions: int, effective: float, freedom: float | None) -> Interval:
    """Return Wilson's interval of a mean p in [0, 1].

    effective: the number of independent answers, right or wrong, whose mean would vary as much as this one. With `freedom`, the
    degrees of freedom of the estimate of it, it is reduced by (z / t)^2. Where p is 0 or 1 there is no estimate, and each
    question counts once.
    """
    n = float(questions)
    if 0 < p < 1:
        n = effective if freedom is None else effective * (Z / t_quantile(freedom)) ** 2
    width = 1 + Z**2 / n
    centre = (p + Z**2 / (2 * n)) / width
    half = Z / width * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return Interval(p, 0.0 if p == 0 else max(0.0, centre - half), 1.0 if p == 1 else min(1.0, centre + half))


def _smoothed_ratio(means: np.ndarray) -> float:
    """Return p (1 - p) / variance of questions' means in [0, 1], to which 1/20 of a 0 and of a 1 are added.

    Without these, scores of which nearly all are 1 would have hardly any variance by chance.
    """
    n, added = len(means), 0.05
    p = (math.fsum(means) + added) / (n + 2 * added)
    squares = math.fsum((value - p) ** 2 for value in means.tolist()) + added * (p**2 + (1 - p) ** 2)
    return p * (1 - p) * (n + 2 * added) / squares


def _bounded_difference(means: np.ndarray) -> Interval:
    """Return an interval in [-1, 1] of the mean of differences [n] between scores in [0, 1]."""
    n, value = len(means), _mean(means)
    if n == 1:
        return Interval(value, math.nan, math.nan)
    if not means.any():
        return Interval(0.0, 0.0, 0.0)
    halves = (1 + means) / 2
    estimate = _wilson((1 + value) / 2, n, n * _smoothed_ratio(halves), n - 1)
    return Interval(value, 2 * estimate.low - 1, 2 * estimate.high - 1)


def _bootstrap(means: np.ndarray) -> Interval:
    """Return an interval of the mean of means [n] by resampling the questions.

    It spans two intervals: the percentile bootstrap's, widened by sqrt(n / (n - 1)) t / z for small n, and the studentized
    bootstrap's, which follows a skew better but breaks down where few values differ.
    """
    n, value = len(means), _mean(means)
    if n == 1:
        return Interval(value, math.nan, math.nan)
    error = math.sqrt(_variance(means))
    if not error:
        return Interval(value, value, value)
    averages, ratios = [], []
    for rows in _resamples(n):
        resampled = means[rows]
        averages.append(resampled.mean(axis=1))
        errors = resampled.std(axis=1, ddof=1) / math.sqrt(n)
        ratios.append((averages[-1] - value) / np.maximum(errors, error * 1e-3))
    ends = [1 - UPPER, UPPER]
    low, high = np.quantile(np.concatenate(averages), ends).tolist()
    least, most = np.quantile(np.concatenate(ratios), ends).tolist()
    wider = math.sqrt(n / (n - 1)) * t_quantile(n - 1) / Z
    return Interval(
        value,
        min(value - (value - low) * wider, value - most * error),
        max(value + (high - value) * wider, value - least * error),
    )


def _resamples(n: int) -> Iterator[np.ndarray]:
    """Yield indices [rows, n] of questions, RESAMPLES rows in all, the same in every call."""
    rng = np.random.default_rng(SEED)
    rows = max(1, CHUNK // n)
    for begin in range(0, RESAMPLES, rows):
        yield rng.integers(0, n, (min(rows, RESAMPLES - begin), n))


def _mean(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean, rounded once, so that the order of the values does not matter."""
    return math.fsum(values) / len(values)


def _variance(means: np.ndarray) -> float:
    """Return the variance of the mean of two or more values; 0 for a single value."""
    n, middle = len(means), _mean(means)
    return math.fsum((value - middle) ** 2 for value in means.tolist()) / max(1, n - 1) / n
