"""RLOO: each answer against the mean of the others, and REINFORCE."""

from functools import partial

import numpy as np
import pytest
import torch

from pipeline.algorithms.advantages import leave_one_out
from pipeline.algorithms.loss import policy_loss
from pipeline.config import LossConfig
from tests.algorithms import reference
from tests.algorithms.sampled import (
    assert_gradcheck,
    assert_however_cut,
    gradient_of,
    largest_difference,
    outputs_of,
    random_sampled,
)

CONFIGS = {
    "by token": LossConfig(disable_ppo_ratio=True),
    "by sequence, KL": LossConfig(disable_ppo_ratio=True, token_level_loss=False, reference_policy_kl_penalty=0.1),
    "weights of sequences": LossConfig(
        disable_ppo_ratio=True,
        token_level_loss=False,
        sequence_level_importance_ratios=True,
        use_importance_sampling_correction=True,
    ),
}


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    rng, differences = np.random.default_rng(2), []
    for size in (2, 3, 8, 33):
        rewards = rng.normal(size=size)
        differences.append(np.abs(leave_one_out(rewards) - reference.group_advantages(rewards, True, False)).max())
    found = {f"RLOO, {name}": largest_difference(config, noise=0.1) for name, config in CONFIGS.items()}
    return found | {"RLOO, advantages": (len(differences), max(differences), None)}


def test_against_the_reference():
    for name, (_, loss, gradient) in largest_differences().items():
        assert loss < 1e-12 and (gradient is None or gradient < 1e-12), name


@pytest.mark.parametrize("name", CONFIGS)
def test_however_sequences_are_cut_and_ordered(name):
    assert_however_cut(partial(policy_loss, CONFIGS[name]), random_sampled(1, reference="KL" in name))


def test_gradcheck():
    assert_gradcheck(partial(policy_loss, CONFIGS["by token"]), random_sampled(2))


def test_advantages_by_hand():
    assert leave_one_out(np.array([1.0, 0.0, 0.0, 0.5])).tolist() == pytest.approx([5 / 6, -0.5, -0.5, 1 / 6])
    assert leave_one_out(np.array([1.0])).tolist() == [0.0]


def test_leave_one_out_is_the_centered_one_times_g_over_g_minus_1():
    rewards = np.random.default_rng(0).normal(size=5)
    np.testing.assert_allclose(leave_one_out(rewards), (rewards - rewards.mean()) * 5 / 4, rtol=1e-12)


def test_loss_and_gradient_by_hand():
    """An old policy changes nothing: there is no ratio."""
    packed = random_sampled(3)
    out = policy_loss(CONFIGS["by token"], outputs_of(packed), packed.batch, packed.counts)
    mask, n = packed.batch.loss_mask, packed.counts.tokens
    assert out.loss.item() == pytest.approx(-(packed.batch.advantages * packed.leaf.detach())[mask].sum().item() / n)
    torch.testing.assert_close(gradient_of(out.loss, packed), -packed.batch.advantages / n, rtol=0, atol=1e-15)
    assert out.metrics["clip_fraction"] == 0
