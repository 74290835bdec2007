"""CISPO: a bounded ratio weighs log pi, so that no token is without a gradient."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipeline.algorithms.loss import policy_loss
from pipeline.config import LossConfig
from tests.algorithms.sampled import assert_however_cut, gradient_of, largest_difference, outputs_of, random_sampled

CONFIGS = {
    "the paper's": LossConfig(use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.5),
    "both bounds, tis": LossConfig(
        use_cispo=True,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=2.0,
    ),
}


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    return {f"CISPO, {name}": largest_difference(config) for name, config in CONFIGS.items()}


def test_against_the_reference():
    for name, (_, loss, gradient) in largest_differences().items():
        assert loss < 1e-12 and gradient < 1e-12, name


@pytest.mark.parametrize("name", CONFIGS)
def test_however_sequences_are_cut_and_ordered(name):
    assert_however_cut(partial(policy_loss, CONFIGS[name]), random_sampled(1))


def test_loss_and_gradient_by_hand():
    """Ratios 4, 4, 1/4 and 1: what is bounded keeps the bound's gradient, praised or blamed."""
    packed = random_sampled(0, lengths=(5,))
    ratios = torch.tensor([1.0, 4.0, 4.0, 0.25, 1.0], dtype=torch.float64)
    with torch.no_grad():
        packed.leaf.fill_(math.log(0.5))
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False, True, True, True, True]),
        old_logprobs=packed.leaf.detach() - ratios.log(),
        advantages=torch.tensor([0.0, 1.0, -1.0, 1.0, -2.0], dtype=torch.float64),
    )
    packed = replace(packed, batch=batch)
    config = LossConfig(use_cispo=True, ratio_clip_min=0.2, ratio_clip_max=1.0)
    out = policy_loss(config, outputs_of(packed), batch, packed.counts)
    weights = [2.0 * 1, 2.0 * -1, 0.8 * 1, 1.0 * -2]
    assert out.loss.item() == pytest.approx(-sum(weights) * math.log(0.5) / 4)
    assert gradient_of(out.loss, packed).tolist() == pytest.approx([0.0] + [-weight / 4 for weight in weights])
    assert out.metrics["clip_fraction"] == 0.75


def test_equal_policies_are_reinforce():
    packed = random_sampled(2, old=False)
    one = policy_loss(CONFIGS["the paper's"], outputs_of(packed), packed.batch, packed.counts)
    other = policy_loss(LossConfig(disable_ppo_ratio=True), outputs_of(packed), packed.batch, packed.counts)
    assert one.loss == other.loss
    assert torch.equal(gradient_of(one.loss, packed), gradient_of(other.loss, packed))
