"""Length-controlled win rate: the win rate that two models would have with answers of equal length.

Judges prefer longer answers. AlpacaEval 2 (https://arxiv.org/abs/2404.04475, section 3) therefore fits a logistic regression to
the verdicts y_i in [0, 1] and then removes the term of length:

    P(the model wins question i) = sigmoid(theta + phi tanh(d_i / std(d)) + psi g_i)
    win rate = mean over i of sigmoid(theta + psi g_i)

d_i is the length of the model's answer minus that of the baseline's, in characters; g_i is the difficulty of the question.
AlpacaEval estimates g from the answers of many models and publishes it. If any record has no difficulty, the term psi g is left
out. The fit maximizes the log-likelihood by Newton's method (iteratively reweighted least squares). A weak ridge keeps the
coefficients finite if length alone decides the verdicts, or if one model always wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RIDGE_LENGTH, RIDGE_OTHERS = 1e-3, 1e-6
"""Ridge weights r of phi, and of theta and psi: the mean loss contains r / 2 * coefficient ** 2."""
STEPS = 100
SMALLEST_STEP = 1e-10


def length_controlled(
    wins: Sequence[float],
    lengths: Sequence[float],
    difficulties: Sequence[float] | None = None,
    ridge_length: float = RIDGE_LENGTH,
) -> np.ndarray:
    """Return one value for each verdict, [n] float64. The mean of the values is the length-controlled win rate.

    Value i is the rate plus the influence of verdict i on the rate, so the values spread as the estimate does: an interval of
    their mean is an interval of the rate. wins: y. lengths: d. difficulties: g.
    """
    y, d = np.asarray(wins, np.float64), np.asarray(lengths, np.float64)
    g = np.zeros(len(y)) if difficulties is None else np.asarray(difficulties, np.float64)
    if not len(y):
        return y
    spread = d.std()
    x = np.stack([np.ones(len(y)), np.tanh(d / spread) if spread > 0 else np.zeros(len(y)), g], 1)
    beta, hessian = _fit(x, y, np.array([RIDGE_OTHERS, ridge_length, RIDGE_OTHERS]))
    free = x * [1, 0, 1]  # with answers of equal length
    rates = _sigmoid(free @ beta)
    gradient = ((rates * (1 - rates))[:, None] * free).mean(0)
    scores = x * (y - _sigmoid(x @ beta))[:, None]
    return rates + (scores - scores.mean(0)) @ np.linalg.solve(hessian, gradient)


def _fit(x: np.ndarray, y: np.ndarray, ridge: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (coefficients [k] that minimize the mean loss, Hessian [k, k] of the mean loss at these coefficients)."""
    beta = np.zeros(x.shape[1])
    for _ in range(STEPS):
        p = _sigmoid(x @ beta)
        hessian = (x * (p * (1 - p))[:, None]).T @ x / len(y) + np.diag(ridge)
        step = np.linalg.solve(hessian, x.T @ (y - p) / len(y) - ridge * beta)
        scale, before = 1.0, _loss(x, y, ridge, beta)
        while _loss(x, y, ridge, beta + scale * step) > before and scale > SMALLEST_STEP:
            scale /= 2
        beta = beta + scale * step
        if np.abs(scale * step).max() < SMALLEST_STEP:
            break
    p = _sigmoid(x @ beta)
    return beta, (x * (p * (1 - p))[:, None]).T @ x / len(y) + np.diag(ridge)


def _loss(x: np.ndarray, y: np.ndarray, ridge: np.ndarray, beta: np.ndarray) -> float:
    logits = x @ beta
    return float((np.logaddexp(0, logits) - y * logits).mean() + (ridge * beta**2).sum() / 2)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -logits))
