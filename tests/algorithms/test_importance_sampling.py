"""Importance sampling between generate and train ranks: weights, bounds, dropped sequences, and metrics."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.loss import (
    importance_log_weights,
    mask_mismatched_sequences,
    mismatch_metrics,
    policy_loss,
    truncate_weights,
)
from pipeline.config import LossConfig
from pipeline.train.outputs import quantiles
from pipeline.types import BIN_EDGES
from tests.algorithms.made import grpo, weighed
from tests.algorithms.packed import Packed
from tests.algorithms.sampled import (
    gradient_of,
    outputs_of,
    random_sampled,
)


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        weighed(),
        weighed("tis", 1.1),
        weighed("tis", 1.1, 0.9),
        weighed("icepop", 1.2, 0.8),
        weighed("seq-mask-tis", 1.05, 0.95),
    ],
)
def test_equal_logprobs_need_no_correction(config, sequences):
    """Weights are exactly 1, within all bounds, and so are their quantiles."""
    level = {
        "sequence_level_importance_ratios": sequences and config.truncated_importance_sampling_type != "seq-mask-tis",
        "token_level_loss": False,
    }
    packed = random_sampled(3, old=False)
    batch = replace(packed.batch, generate_logprobs=packed.leaf.detach().clone())
    one = policy_loss(LossConfig(**level), outputs_of(packed), batch, packed.counts)
    other = policy_loss(replace(config, **level), outputs_of(packed), batch, packed.counts)
    assert one.loss == other.loss
    assert torch.equal(gradient_of(one.loss, packed), gradient_of(other.loss, packed))
    metrics = other.metrics
    for metric in ("token_mult_prob_error", "sampling_importance_ratio"):
        assert metrics[metric].item() == pytest.approx(1, abs=1e-15), metric
    assert metrics["seq_mult_prob_error_max"] == metrics["seq_mult_prob_error_min"] == 1
    for metric in ("gen_kl_error", "policy_kl_error", "js_divergence_error", "gen_logprob_error_max"):
        assert metrics[metric].item() == pytest.approx(0, abs=1e-15), metric
    assert metrics.get("is_oob_ratio", torch.tensor(0.0)) == 0
    assert quantiles(metrics["sampling_importance_ratio_histogram"].numpy()) == {"p01": 1.0, "p50": 1.0, "p99": 1.0}


# ---- by hand: two sequences, weights 1/2 and 4, and 1.1 -----------------------------------------------------------------


def by_hand(weights: tuple[float, ...] = (0.5, 4.0, 1.1), lengths: tuple[int, ...] = (3, 2)) -> Packed:
    packed = random_sampled(0, lengths=lengths)
    mask = packed.batch.positions > 0
    logs = torch.zeros(sum(lengths), dtype=torch.float64)
    logs[mask] = torch.tensor(weights, dtype=torch.float64).log()
    old = torch.full_like(logs, -3.0)
    return replace(packed, batch=replace(packed.batch, loss_mask=mask, old_logprobs=old, generate_logprobs=old - logs))


@pytest.mark.parametrize(
    ("config", "weights", "outside"),
    [
        (weighed(), [0.5, 4.0, 1.1], [False, False, False]),
        (weighed("tis", 2.0), [0.5, 2.0, 1.1], [False, True, False]),
        (weighed("tis", 2.0, 1.0), [1.0, 2.0, 1.1], [True, True, False]),
        (weighed("icepop", 2.0, 0.6), [0.0, 0.0, 1.1], [True, True, False]),
        # The first sequence's geometric mean is sqrt(2), the second's 1.1.
        (weighed("seq-mask-tis", 1.2, 0.9), [0.0, 0.0, 1.1], [True, True, False]),
        (weighed("seq-mask-tis", 1.5, 1.2), [0.5, 4.0, 0.0], [False, False, True]),
        (weighed(sequence_level_importance_ratios=True), [2.0, 2.0, 1.1], [False, False, False]),
        (weighed("tis", 1.5, sequence_level_importance_ratios=True), [1.5, 1.5, 1.1], [True, True, False]),
        (weighed("tis", 1.5, sequence_level_importance_weights=True), [1.5, 1.5, 1.1], [True, True, False]),
        (weighed("icepop", 1.5, 0.5, sequence_level_importance_ratios=True), [0.0, 0.0, 1.1], [True, True, False]),
    ],
)
def test_weights_by_hand(config, weights, outside):
    packed = by_hand()
    batch, mask = packed.batch, packed.batch.loss_mask
    found, beyond = truncate_weights(importance_log_weights(batch.old_logprobs, batch, config), batch, config)
    assert found[mask].tolist() == pytest.approx(weights)
    assert beyond[mask].tolist() == outside


@pytest.mark.parametrize(
    ("config", "ratio", "outside"),
    [
        (weighed("tis", 2.0), (0.5 + 4 + 1.1) / 3, 1 / 3),
        (weighed("seq-mask-tis", 1.2, 0.9), (0.5 + 4 + 1.1) / 3, 1 / 2),
        (
            weighed("tis", 1.5, sequence_level_importance_ratios=True, token_level_loss=False),
            (2.0 + 1.1) / 2,
            1 / 2,
        ),
    ],
)
def test_mean_weight_and_share_out_of_bounds_by_hand(config, ratio, outside):
    """The share is of tokens, or of sequences where sequences are weighted or left out."""
    packed = by_hand()
    metrics = policy_loss(config, outputs_of(packed), packed.batch, packed.counts).metrics
    assert metrics["sampling_importance_ratio"].item() == pytest.approx(ratio)
    assert metrics["is_oob_ratio"].item() == pytest.approx(outside)
    assert "is_oob_ratio" not in policy_loss(weighed(), outputs_of(packed), packed.batch, packed.counts).metrics


def test_mismatch_by_hand():
    packed = by_hand()
    metrics = mismatch_metrics(packed.batch.old_logprobs, packed.batch, packed.counts)
    w = np.array([0.5, 4.0, 1.1])
    expected = {
        "token_mult_prob_error": (2 + 4 + 1.1) / 3,
        "seq_mult_prob_error_max": 3.0,
        "seq_mult_prob_error_min": 1.1,
        "gen_logprob_error_max": math.log(4),
        "gen_kl_error": (w - 1 - np.log(w)).mean(),
        "policy_kl_error": (1 / w - 1 + np.log(w)).mean(),
        "js_divergence_error": ((w * np.log(w) - (1 + w) * np.log((1 + w) / 2)) / 2).mean(),
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)


def test_divergences_are_the_exact_ones_over_tokens_drawn_from_the_generate_ranks():
    """Each token of a vocabulary is one token of the batch; weighting each by its probability gives the expectation."""
    generate, old = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    found: dict[str, float] = {}
    for p, q in zip(generate, old, strict=True):
        packed = by_hand((1.0,), lengths=(2,))
        batch = replace(packed.batch, generate_logprobs=p.repeat(2), old_logprobs=q.repeat(2))
        for name, value in mismatch_metrics(batch.old_logprobs, batch, packed.counts).items():
            found[name] = found.get(name, 0.0) + p.exp().item() * value.item()
    middle = torch.log((generate.exp() + old.exp()) / 2)
    jensen_shannon = (generate.exp() * (generate - middle) + old.exp() * (old - middle)).sum() / 2
    assert found["gen_kl_error"] == pytest.approx((generate.exp() * (generate - old)).sum().item())
    assert found["js_divergence_error"] == pytest.approx(jensen_shannon.item())


# ---- sequences left out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "kept"), [(1.0, [False, False]), (1.1001, [False, True]), (2.9, [False, True]), (3.0001, [True, True])]
)
def test_sequences_above_the_threshold_are_left_out(threshold, kept):
    """Errors are (2 + 4) / 2 and 1.1, of tokens 1, 2 and of token 4."""
    packed = by_hand()
    found = mask_mismatched_sequences(packed.batch, threshold)
    assert found.tolist() == [False, kept[0], kept[0], False, kept[1]]
    estimated = grpo(seq_logprob_error_threshold=threshold).estimate(packed.batch)
    assert torch.equal(estimated.loss_mask, found) and torch.equal(estimated.advantages, packed.batch.advantages)


def test_a_sequence_left_out_changes_nothing():
    packed = by_hand()
    kept = replace(packed, batch=replace(packed.batch, loss_mask=mask_mismatched_sequences(packed.batch, 1.5)))
    counts = replace(packed.counts, tokens=1, sequences=1)
    for token_level in (True, False):
        config = LossConfig(token_level_loss=token_level)
        out = policy_loss(config, outputs_of(kept), kept.batch, counts)
        assert gradient_of(out.loss, packed)[:4].tolist() == [0.0] * 4
        assert out.metrics["seq_mult_prob_error_max"].item() == pytest.approx(1.1)


# ---- quantiles --------------------------------------------------------------------------------------------------------


def test_quantiles_of_weights():
    """The histogram's quantiles of 1000 tokens equal the weights' to the width of a bin (12 % of log w)."""
    rng = np.random.default_rng(0)
    logs = rng.normal(scale=0.02, size=1000)
    packed = by_hand(tuple(np.exp(logs)), lengths=(1001,))
    shares = policy_loss(weighed(), outputs_of(packed), packed.batch, packed.counts).metrics[
        "sampling_importance_ratio_histogram"
    ]
    assert shares.sum().item() == pytest.approx(1)
    found = quantiles(shares.numpy())
    for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = np.quantile(logs, q)
        assert math.log(found[name]) == pytest.approx(exact, rel=0.15, abs=1e-4), name


def test_weights_beyond_the_bins_are_in_the_outermost_ones():
    packed = by_hand((math.exp(-30), math.exp(30), 1.0))
    shares = policy_loss(weighed(), outputs_of(packed), packed.batch, packed.counts).metrics[
        "sampling_importance_ratio_histogram"
    ]
    assert shares[0].item() == shares[-1].item() == shares[len(shares) // 2].item() == pytest.approx(1 / 3)
    assert quantiles(shares.numpy()) == pytest.approx({"p01": math.exp(-10), "p50": 1.0, "p99": math.exp(10)})
    assert math.isnan(quantiles(np.zeros(len(shares)))["p50"])
    assert all(a < b for a, b in itertools.pairwise(BIN_EDGES))
