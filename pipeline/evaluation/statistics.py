"""Compute 95% intervals of scores, and paired comparisons of two evaluations of the same questions.

The questions are taken as a random sample of all questions that the task could ask. Several answers to one question are one
cluster, so each question weighs the same in a score, whatever its number of samples.

    scores in [0, 1]   Wilson's interval with the effective sample size p (1 - p) / variance of the mean
    other scores       bootstrap over questions, widened for small samples
    with a Scale       the same after a map to [0, 1] or to logarithms, so that both ends are values that the score can have
    pairs, interval    Wilson's interval of (1 + difference) / 2 for scores in [0, 1], otherwise bootstrap over the differences
                       of the questions
    pairs, test        McNemar's mid-p if each question has one answer, right or wrong, otherwise a randomization test that
                       swaps the two evaluations question by question

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
"""Number of resamples of a bootstrap, and of random swaps in a randomization test."""
SEED = 20_000
CHUNK = 1 << 21
"""Random numbers drawn at once."""

Verdict = Literal["better", "worse", "changed", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A score with its 95% interval. An end is NaN if it cannot be known, as for a single real-valued question."""

    value: float
    low: float
    high: float


UNKNOWN = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of a score. Values of single questions may be outside of it: weighted values, or a quotient's linearization."""

    low: float
    high: float = math.inf
    exponential: bool = False  # the score is exp(a mean), as a perplexity is


SHARE = Scale(0.0, 1.0)


# ---- one evaluation ---------------------------------------------------------------------------------------------------------


def interval(questions: Collection[Sequence[float]], scale: Scale | None = None) -> Interval:
    """Return the mean over questions of the mean over a question's samples, with its interval.

    questions: for each question, the values of its samples. Questions without a sample are left out.
    """
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
        # The values are middle (1 + x - mean of x) of x in nats (`pipeline/evaluation/lm_eval_tasks.py`).
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
    """Return the interval with its ends cut to the scale. An end that is NaN stays NaN."""
    low, high = estimate.low, estimate.high
    return Interval(estimate.value, scale.low if low < scale.low else low, scale.high if high > scale.high else high)


def _exp(nats: float) -> float:
    """Return e**nats, or NaN if that is above the largest float."""
    return math.exp(nats) if nats < 709 else math.nan


def macro_interval(groups: Collection[Collection[Sequence[float]]], scale: Scale | None = None) -> Interval:
    """Return the mean over groups of each group's mean over its questions, with its interval."""
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
    """Return question id -> [pass@k]: the chance that at least one of k of its samples, drawn without replacement, scores 1.

    The estimate is unbiased (Chen et al., 2021, arXiv:2107.03374). Questions with fewer than k judged samples are left out.
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
    """The score of a second evaluation minus the score of a first one, over the questions that both have.

    The ends are NaN if there is no interval, as for a single question.
    """

    value: float
    low: float
    high: float
    p_value: float
    questions: int
    gained: int  # questions that the second evaluation does better
    lost: int
    lower_is_better: bool | None = False  # None: neither is, and `gained` counts higher scores

    @property
    def shown(self) -> str:
        """The difference with its interval as a text for people; "-" stands for an unknown interval."""
        ends = "-" if math.isnan(self.low) or math.isnan(self.high) else f"{self.low:+.4f}, {self.high:+.4f}"
        return f"{self.value:+.4f} [{ends}]"

    @property
    def verdict(self) -> Verdict:
        """The second evaluation is "better" or "worse" if both the interval and the test say so, else "cannot tell".

        A score that is neither better higher nor lower has "changed".
        """
        if self.p_value < ALPHA and (self.low > 0 or self.high < 0):
            if self.lower_is_better is None:
                return "changed"
            return "better" if (self.value > 0) != self.lower_is_better else "worse"
        return "cannot tell"


def difference(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    lower_is_better: bool | None = False,
    exponential: bool = False,
) -> Difference:
    """Compare two evaluations by their question id -> values. Questions that only one of them has are left out.

    exponential: as `Scale.exponential`. The logarithms of the scores are then compared, and each end d of the interval of their
    difference becomes first score * (exp(d) - 1).
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
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], lower_is_better: bool | None
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
    """Return McNemar's mid-p: the two-sided binomial p-value of the changed answers, with the outcome's own probability halved.

    gained, lost: numbers of questions that became right and wrong.
    """
    count, fewer = gained + lost, min(gained, lost)
    logs = [math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in range(fewer + 1)]
    chances = [math.exp(log - count * math.log(2)) for log in logs]
    return min(1.0, 2 * math.fsum(chances) - chances[-1])


def _swap_test(means: np.ndarray) -> float:
    """Return the p-value of the sum of differences [n]: how often random swaps of questions' scores give as large a sum."""
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
    """Return the 97.5% quantile of Student's t with a relative error of 1e-10. freedom: degrees of freedom, 0.1 or more.

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

    effective: the number of independent answers, right or wrong, whose mean would vary as much as p does. freedom: the degrees
    of freedom of that estimate; `effective` is then multiplied by (z / t)^2. If p is 0 or 1 there is no estimate, and
    `questions` replaces `effective`.
    """
    n = float(questions)
    if 0 < p < 1:
        n = effective if freedom is None else effective * (Z / t_quantile(freedom)) ** 2
    width = 1 + Z**2 / n
    centre = (p + Z**2 / (2 * n)) / width
    half = Z / width * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return Interval(p, 0.0 if p == 0 else max(0.0, centre - half), 1.0 if p == 1 else min(1.0, centre + half))


def _smoothed_ratio(means: np.ndarray) -> float:
    """Return p (1 - p) / variance of the questions' means, which are in [0, 1].

    A question of mean 0 and one of mean 1 are added, each with weight 1/20. Without them, scores that are nearly all 1 would by
    chance have hardly any variance.
    """
    n, added = len(means), 0.05
    p = (math.fsum(means) + added) / (n + 2 * added)
    squares = math.fsum((value - p) ** 2 for value in means.tolist()) + added * (p**2 + (1 - p) ** 2)
    return p * (1 - p) * (n + 2 * added) / squares


def _bounded_difference(means: np.ndarray) -> Interval:
    """Return the mean of differences [n] between scores in [0, 1], with an interval in [-1, 1]."""
    n, value = len(means), _mean(means)
    if n == 1:
        return Interval(value, math.nan, math.nan)
    if not means.any():
        return Interval(0.0, 0.0, 0.0)
    halves = (1 + means) / 2
    estimate = _wilson((1 + value) / 2, n, n * _smoothed_ratio(halves), n - 1)
    return Interval(value, 2 * estimate.low - 1, 2 * estimate.high - 1)


def _bootstrap(means: np.ndarray) -> Interval:
    """Return the mean of the questions' means [n], with an interval from resampling the questions.

    The interval covers two others: that of the percentile bootstrap, widened by sqrt(n / (n - 1)) t / z for small n, and that
    of the studentized bootstrap, which follows a skew better but fails if few values differ.
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
    """Yield arrays [rows, n] of random question indices, RESAMPLES rows in all. Every call yields the same indices."""
    rng = np.random.default_rng(SEED)
    rows = max(1, CHUNK // n)
    for begin in range(0, RESAMPLES, rows):
        yield rng.integers(0, n, (min(rows, RESAMPLES - begin), n))


def _mean(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean. Only the exact sum is rounded, so the order of the values does not matter."""
    return math.fsum(values) / len(values)


def _variance(means: np.ndarray) -> float:
    """Return the variance of the mean of two or more values; 0 for a single value."""
    n, middle = len(means), _mean(means)
    return math.fsum((value - middle) ** 2 for value in means.tolist()) / max(1, n - 1) / n
