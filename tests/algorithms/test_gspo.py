"""GSPO: one ratio for a sequence, which is clipped as a whole."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipeline.algorithms.loss import policy_loss, sequence_log_ratios
from pipeline.config import LossConfig
from tests.algorithms.sampled import (
    assert_gradcheck,
    assert_however_cut,
    gradient_of,
    largest_difference,
    outputs_of,
    random_sampled,
)

SEQUENCES = {"sequence_level_importance_ratios": True, "token_level_loss": False}
WEIGHED = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.5}
CONFIGS = {
    "the paper's": LossConfig(**SEQUENCES, ratio_clip_min=3e-4, ratio_clip_max=4e-4),
    "wide bounds": LossConfig(**SEQUENCES),
    "dual clip": LossConfig(**SEQUENCES, ratio_clip_c=1.1),
    "importance sampling": LossConfig(**SEQUENCES, use_importance_sampling_correction=True),
    "tis": LossConfig(**SEQUENCES, **WEIGHED, truncated_importance_sampling_type="tis"),
    "icepop": LossConfig(
        **SEQUENCES, **WEIGHED, truncated_importance_sampling_type="icepop", truncated_importance_sampling_ratio_min=0.5
    ),
}


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    return {f"GSPO, {name}": largest_difference(config, noise=0.1) for name, config in CONFIGS.items()}


def test_against_the_reference():
    for name, (_, loss, gradient) in largest_differences().items():
        assert loss < 1e-12 and gradient < 1e-12, name


@pytest.mark.parametrize("name", CONFIGS)
def test_however_sequences_are_cut_and_ordered(name):
    assert_however_cut(partial(policy_loss, CONFIGS[name]), random_sampled(1, noise=0.1))


def test_gradcheck():
    assert_gradcheck(partial(policy_loss, CONFIGS["wide bounds"]), random_sampled(2))


def test_the_ratio_is_the_geometric_mean():
    packed = random_sampled(0, lengths=(4, 3))
    mask = torch.tensor([False, True, False, True, False, False, True])
    ratios = torch.tensor([9.0, 2.0, 9.0, 8.0, 9.0, 9.0, 0.5], dtype=torch.float64)
    found = sequence_log_ratios(ratios.log(), replace(packed.batch, loss_mask=mask)).exp()
    assert found.tolist() == pytest.approx([4.0, 4.0, 4.0, 4.0, 0.5, 0.5, 0.5])


def test_a_sequence_is_clipped_as_a_whole():
    """Ratios 2 and 1/2 of one sequence are a ratio of 1; ratios of 1.5 all are above 1.2."""
    packed = random_sampled(0, lengths=(3, 3))
    ratios = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False, True, True] * 2),
        old_logprobs=packed.leaf.detach() - ratios.log(),
        advantages=torch.tensor([0.0, 1.0, 1.0] * 2, dtype=torch.float64),
    )
    packed = replace(packed, batch=batch)
    out = policy_loss(LossConfig(**SEQUENCES), outputs_of(packed), batch, packed.counts)
    assert out.loss.item() == pytest.approx(-(1 + 1.2) / 2)
    assert gradient_of(out.loss, packed).tolist() == pytest.approx([0, -0.25, -0.25, 0, 0, 0])
    assert out.metrics["clip_fraction"] == 0.5


def test_equal_policies_are_reinforce_by_sequence():
    packed = random_sampled(3, old=False)
    out = policy_loss(LossConfig(**SEQUENCES), outputs_of(packed), packed.batch, packed.counts)
    expected = policy_loss(LossConfig(token_level_loss=False), outputs_of(packed), packed.batch, packed.counts)
    assert out.metrics["ratio_max"] == out.metrics["ratio_min"] == 1
    assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-15)
    # With one advantage for all tokens of a sequence, the gradients are the same too.
    constant = torch.cat([torch.full((n,), math.sin(n), dtype=torch.float64) for n in packed.batch.lengths])
    batch = replace(packed.batch, advantages=constant)
    one = gradient_of(policy_loss(LossConfig(**SEQUENCES), outputs_of(packed), batch, packed.counts).loss, packed)
    other = gradient_of(policy_loss(LossConfig(token_level_loss=False), outputs_of(packed), batch, packed.counts).loss, packed)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
