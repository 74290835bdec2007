"""Rewards and advantages: by hand, and against a second implementation."""

import itertools
import math

import numpy as np
import pytest

from pipeline.algorithms.advantages import (
    GROUP_EPSILON,
    center,
    group_advantages,
    leave_one_out,
    scaled_rewards,
    shaped_rewards,
    soft_overlong_penalty,
    varies,
)
from pipeline.algorithms.algorithm import Needs
from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.sections import RewardScalingConfig, RewardShapingConfig
from pipeline.config import GRPOConfig, LossConfig, PPOConfig
from tests.algorithms import reference
from tests.algorithms.groups import group_of
from tests.algorithms.made import grpo, made

OVERLONG = RewardShapingConfig(enabled=True, max_response_length=20, overlong_buffer_length=4)


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    rng, differences = np.random.default_rng(0), []
    for left_out, normalize, size in itertools.product((True, False), (True, False), (2, 3, 5, 16)):
        for rewards in (rng.normal(size=size), rng.integers(0, 2, size).astype(float), np.full(size, 0.7)):
            expected = reference.group_advantages(rewards, left_out, normalize)
            differences.append(np.abs(group_advantages(rewards, left_out, normalize) - expected).max())
            if not normalize:
                unscaled = leave_one_out(rewards) if left_out else center(rewards)
                differences.append(np.abs(unscaled - expected).max())
    lengths = np.arange(1, 30)
    expected = [0.0 if n <= 16 else (16 - n) / 4 for n in lengths]  # eq. 13, whose -1 beyond 20 the peers' codes do not have
    penalty = np.abs(soft_overlong_penalty(lengths, OVERLONG) - expected).max()
    return {
        "GRPO, RLOO, Dr. GRPO, advantages of groups": (len(differences), max(differences), None),
        "DAPO, soft overlong penalty": (len(lengths), penalty, None),
    }


def test_against_the_reference():
    differences = largest_differences()
    assert len(differences) == 2
    for name, (cases, difference, _) in differences.items():
        assert cases >= 8 and difference < 1e-12, name


# ---- advantages of groups --------------------------------------------------------------------------------------------


def test_mean_baseline_by_hand():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], False, normalize=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out_by_hand():
    assert group_advantages([1.0, 0.0, 0.0], True, normalize=False).tolist() == [1.0, -0.5, -0.5]


def test_normalised_by_hand():
    expected = 0.5 / (math.sqrt(4 * 0.25 / 3) + GROUP_EPSILON)
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0], False, normalize=True)
    np.testing.assert_allclose(advantages, [expected, -expected, -expected, expected], rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7])
def test_leave_one_out_normalised_by_hand(value):
    """The only correct sample sees others that do not vary, so it is not divided.

    It is not even divided by what is left of their deviation after rounding; the others see (1, 0, 0).
    """
    advantages = group_advantages([value + 1, value, value, value], True, normalize=True)
    expected = -(1 / 3) / (math.sqrt(1 / 3) + GROUP_EPSILON)
    np.testing.assert_allclose(advantages, [1.0, expected, expected, expected], rtol=1e-12)


@pytest.mark.parametrize(("left_out", "normalize"), list(itertools.product([True, False], repeat=2)))
def test_equal_rewards_give_no_advantage(left_out, normalize):
    for size in (1, 2, 5, 7):
        assert not group_advantages([0.7] * size, left_out, normalize).any()


def test_advantages_without_scale_are_shift_invariant_and_sum_to_zero():
    rewards = np.random.default_rng(0).normal(size=8)
    for left_out in (True, False):
        one = group_advantages(rewards, left_out, normalize=False)
        np.testing.assert_allclose(one, group_advantages(rewards + 3, left_out, normalize=False), atol=1e-12)
        assert abs(one.sum()) < 1e-12


def test_rloo_by_hand():
    assert leave_one_out(np.array([1.0, 0.0, 0.0, 0.5])).tolist() == pytest.approx([5 / 6, -0.5, -0.5, 1 / 6])
    assert leave_one_out(np.array([1.0])).tolist() == [0.0]


def test_leave_one_out_is_the_centered_one_times_g_over_g_minus_1():
    rewards = np.random.default_rng(0).normal(size=5)
    np.testing.assert_allclose(leave_one_out(rewards), (rewards - rewards.mean()) * 5 / 4, rtol=1e-12)


def test_dr_grpo_by_hand():
    """Easy and hard prompts count alike: a correct answer's advantage is the share of wrong ones."""
    groups = [group_of([1.0, 1.0, 1.0, 0.0]), group_of([1.0, 0.0, 0.0, 0.0])]
    samples = grpo(normalize_rewards=False, use_leave_one_out_baseline=False).compute_advantages(groups)
    assert [sample.advantages[-1] for sample in samples] == [0.25, 0.25, 0.25, -0.75, 0.75, -0.25, -0.25, -0.25]


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_samples_mask_the_prompt_and_spreads_the_advantage():
    first, second = grpo(normalize_rewards=False).compute_advantages([group_of([1.0, 0.25], lengths=[2, 1])])
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert first.loss_mask.tolist() == [False, False, True, True]
    np.testing.assert_allclose(first.logprobs, [0, 0, -0.1, -0.2], rtol=1e-6)
    assert first.advantages.tolist() == [0, 0, 0.75, 0.75] and first.reward == 1.0
    assert second.advantages.tolist() == [0, 0, -0.75] and second.reward == 0.25


def test_needs_follow_from_the_recipe():
    assert grpo().needs == Needs(truncated=True)
    assert grpo(updates=2).needs == Needs(truncated=True, old=True, old_of_first=False)
    assert grpo(updates=4).old_share == 0.75 and grpo().old_share == 0.0
    assert grpo(updates=4, seq_logprob_error_threshold=2.0).old_share == 1.0


def test_a_users_loss_gets_the_old_log_probs_of_every_update():
    class Users(GRPO):
        def loss(self, outputs, batch, counts):
            raise NotImplementedError

    assert Users(grpo(updates=2).recipe).needs.old_of_first


def test_adapters_with_dropout_need_a_pass_without_it():
    recipe = grpo(updates=2).recipe
    recipe.policy.dtensor_cfg.lora_cfg.dropout = 0.1
    assert GRPO(recipe).needs.old_of_first
    assert grpo(LossConfig(force_on_policy_ratio=True)).needs == Needs(truncated=True)
    assert grpo(LossConfig(reference_policy_kl_penalty=0.1)).needs == Needs(truncated=True, reference=True)
    assert (
        grpo(LossConfig(log_entropy=True)).needs
        == grpo(LossConfig(entropy_coeff=0.1)).needs
        == Needs(truncated=True, entropy=True)
    )
    assert grpo(seq_logprob_error_threshold=2.0).needs == Needs(truncated=True, old=True, estimates=True)
    assert grpo(LossConfig(use_generation_logprobs=True), updates=4).needs == Needs(truncated=True)
    assert grpo(LossConfig(use_generation_logprobs=True), updates=4).old_share == 0
    forced = LossConfig(force_on_policy_ratio=True)
    assert grpo(forced, seq_logprob_error_threshold=2.0).needs == Needs(truncated=True, old=True, estimates=True)
    selected = Needs(truncated=True, old=True, entropy=True, top_entropy=0.2)
    assert grpo(LossConfig(top_entropy_quantile=0.2)).needs == selected
    assert grpo(LossConfig(top_entropy_quantile=0.2, use_generation_logprobs=True), updates=4).needs == selected
    assert grpo().trains(0) == ("policy",)


# ---- dynamic sampling ------------------------------------------------------------------------------------------------


def algorithms(**keys):
    """Return GRPO's and PPO's algorithms, which select and shape alike."""
    return grpo(**keys), made(PPOConfig(**keys), LossConfig(), updates=1)


def test_groups_that_vary_are_kept():
    groups = [group_of([1.0, 1.0]), group_of([0.0, 1.0]), group_of([0.0, 0.0]), group_of([0.3, 0.31])]
    for algorithm in algorithms(use_dynamic_sampling=True):
        assert algorithm.select(groups) == [groups[1], groups[3]]
    for algorithm in algorithms():
        assert algorithm.select(groups) == groups
    assert not varies(np.full(7, 0.1))


def test_rounding_is_no_variation():
    """Scores of one answer in two microbatches differ only by rounding."""
    scores = np.array([3.1, 3.1 + 2e-6, 3.1 - 1e-6])
    assert not varies(scores)
    assert varies(scores + np.array([0, 0, 1e-3]))


def test_lengths_do_not_keep_a_group():
    """The shaped rewards of the second answer differ from the first's; the rewards for dynamic sampling do not."""
    group = group_of([1.0, 1.0], lengths=[5, 19])
    keys = {"use_dynamic_sampling": True, "reward_shaping": OVERLONG}
    assert shaped_rewards(group, GRPOConfig(**keys)).tolist() == [1.0, 0.25]
    for algorithm in algorithms(**keys):
        assert algorithm.select([group]) == []


def test_rewards_that_scaling_makes_equal_are_not_kept():
    scaling = RewardScalingConfig(enabled=True, source_max=1.0)
    selected = [made.select([group_of([1.0, 2.0])]) for made in algorithms(use_dynamic_sampling=True, reward_scaling=scaling)]
    assert selected == [[], []]


# ---- rewards ---------------------------------------------------------------------------------------------------------


def test_soft_overlong_penalty_by_hand():
    lengths = np.array([1, 16, 17, 18, 20, 25])
    assert soft_overlong_penalty(lengths, RewardShapingConfig(True, 4, 0.5, 20)).tolist() == [0, 0, -0.125, -0.25, -0.5, -1.125]


def test_scaling_clamps_and_maps():
    config = RewardScalingConfig(enabled=True, source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)
    assert scaled_rewards(group_of([-1.0, 0.0, 0.5, 2.0, 3.0]), config).tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]
    assert scaled_rewards(group_of([-1.0, 3.0]), RewardScalingConfig()).tolist() == [-1.0, 3.0]


def test_a_truncated_answers_reward_is_multiplied():
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25, max_response_length=4)
    group = group_of([1.0, 1.0, -2.0], lengths=[50, 50, 50], cut=[False, True, True])
    assert shaped_rewards(group, GRPOConfig(reward_shaping=shaping)).tolist() == [1.0, 0.25, -0.5]


def test_scaling_comes_before_shaping():
    scaling = RewardScalingConfig(enabled=True, target_min=-1.0)
    config = GRPOConfig(reward_scaling=scaling, reward_shaping=OVERLONG)
    assert shaped_rewards(group_of([1.0, 0.0], lengths=[18, 18]), config).tolist() == [0.5, -1.5]


def test_overlong_filtering_excludes_truncated_answers_from_the_loss_but_not_the_baseline():
    group = group_of([1.0, 0.0, 0.0], cut=[False, True, False])
    for algorithm in algorithms(overlong_filtering=True):
        kept = [bool(sample.loss_mask.any()) for sample in algorithm.compute_advantages([group])]
        assert kept == [True, False, True]
    with_it, without = (grpo(overlong_filtering=on).compute_advantages([group]) for on in (True, False))
    assert with_it[0].advantages.tolist() == without[0].advantages.tolist()
    assert not with_it[1].advantages.any() and not with_it[1].logprobs.any()
    for algorithm in algorithms():
        assert all(sample.loss_mask.any() for sample in algorithm.compute_advantages([group]))
