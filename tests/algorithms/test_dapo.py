"""DAPO: clip-higher, dynamic sampling, overlong filtering and the soft overlong penalty; and what else becomes of rewards."""

from functools import partial

import numpy as np
import pytest

from pipeline.algorithms.advantages import scaled_rewards, shaped_rewards, soft_overlong_penalty, varies
from pipeline.algorithms.loss import policy_loss
from pipeline.config import (
    GRPOConfig,
    LossConfig,
    PPOConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from tests.algorithms.groups import group_of
from tests.algorithms.made import made
from tests.algorithms.sampled import assert_gradcheck, assert_however_cut, largest_difference, random_sampled
from tests.algorithms.test_grpo import by_hand, grpo

CONFIG = LossConfig(ratio_clip_min=0.2, ratio_clip_max=0.28)
OVERLONG = RewardShapingConfig(enabled=True, max_response_length=20, overlong_buffer_length=4)


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    lengths = np.arange(1, 30)
    expected = [0.0 if n <= 16 else (16 - n) / 4 for n in lengths]  # eq. 13, whose -1 beyond 20 the peers' codes do not have
    penalty = np.abs(soft_overlong_penalty(lengths, RewardShapingConfig(True, 4, 1.0, 20)) - expected).max()
    return {"DAPO": largest_difference(CONFIG), "DAPO, soft overlong penalty": (len(lengths), penalty, None)}


def test_against_the_reference():
    for name, (_, loss, gradient) in largest_differences().items():
        assert loss < 1e-12 and (gradient is None or gradient < 1e-12), name


def test_however_sequences_are_cut_and_ordered():
    assert_however_cut(partial(policy_loss, CONFIG), random_sampled(1))


def test_gradcheck():
    assert_gradcheck(partial(policy_loss, CONFIG), random_sampled(2))


def test_clip_higher_by_hand():
    loss, gradient, metrics = by_hand(CONFIG, [1.25, 1.3, 0.75], [1.0, 1.0, -1.0])
    assert loss == pytest.approx((-1.25 - 1.28 + 0.8) / 3)
    assert gradient == pytest.approx([-1.25 / 3, 0.0, 0.0])
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)


# ---- dynamic sampling -------------------------------------------------------------------------------------------------


def algorithms(**keys):
    """GRPO's and PPO's, which select and shape alike."""
    return grpo(**keys), made(PPOConfig(**keys), LossConfig(), updates=1)


def test_groups_that_vary_are_kept():
    groups = [group_of([1.0, 1.0]), group_of([0.0, 1.0]), group_of([0.0, 0.0]), group_of([0.3, 0.31])]
    for algorithm in algorithms(use_dynamic_sampling=True):
        assert algorithm.select(groups) == [groups[1], groups[3]]
    for algorithm in algorithms():
        assert algorithm.select(groups) == groups
    assert not varies(np.full(7, 0.1))


def test_lengths_are_no_reason_to_keep_a_group():
    """The shaped rewards of the second answer differ from the first's; what dynamic sampling looks at do not."""
    group = group_of([1.0, 1.0], lengths=[5, 19])
    keys = {"use_dynamic_sampling": True, "reward_shaping": OVERLONG}
    assert shaped_rewards(group, GRPOConfig(**keys)).tolist() == [1.0, 0.25]
    for algorithm in algorithms(**keys):
        assert algorithm.select([group]) == []


def test_rewards_that_scaling_makes_equal_are_not_kept():
    scaling = RewardScalingConfig(enabled=True, source_max=1.0)
    for algorithm in algorithms(use_dynamic_sampling=True, reward_scaling=scaling):
        assert algorithm.select([group_of([1.0, 2.0])]) == []


# ---- rewards ----------------------------------------------------------------------------------------------------------


def test_soft_overlong_penalty_by_hand():
    lengths = np.array([1, 16, 17, 18, 20, 25])
    assert soft_overlong_penalty(lengths, RewardShapingConfig(True, 4, 0.5, 20)).tolist() == [0, 0, -0.125, -0.25, -0.5, -1.125]


def test_scaling_clamps_and_maps():
    config = RewardScalingConfig(enabled=True, source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)
    assert scaled_rewards(group_of([-1.0, 0.0, 0.5, 2.0, 3.0]), config).tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]
    assert scaled_rewards(group_of([-1.0, 3.0]), RewardScalingConfig()).tolist() == [-1.0, 3.0]


def test_a_cut_answers_reward_is_multiplied():
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25, max_response_length=4)
    group = group_of([1.0, 1.0, -2.0], lengths=[50, 50, 50], cut=[False, True, True])
    assert shaped_rewards(group, GRPOConfig(reward_shaping=shaping)).tolist() == [1.0, 0.25, -0.5]


def test_scaling_comes_before_shaping():
    scaling = RewardScalingConfig(enabled=True, target_min=-1.0)
    config = GRPOConfig(reward_scaling=scaling, reward_shaping=OVERLONG)
    assert shaped_rewards(group_of([1.0, 0.0], lengths=[18, 18]), config).tolist() == [0.5, -1.5]


def test_overlong_filtering_leaves_cut_answers_out_of_the_loss_but_not_out_of_the_baseline():
    group = group_of([1.0, 0.0, 0.0], cut=[False, True, False])
    for algorithm in algorithms(overlong_filtering=True):
        kept = [bool(sample.loss_mask.any()) for sample in algorithm.compute_advantages([group])]
        assert kept == [True, False, True]
    with_it, without = (grpo(overlong_filtering=on).compute_advantages([group]) for on in (True, False))
    assert with_it[0].advantages.tolist() == without[0].advantages.tolist()
    assert not with_it[1].advantages.any() and not with_it[1].logprobs.any()
    for algorithm in algorithms():
        assert all(sample.loss_mask.any() for sample in algorithm.compute_advantages([group]))


def test_rounding_is_no_variation():
    """A reward model's scores of the same answer in two microbatches."""
    scores = np.array([3.1, 3.1 + 2e-6, 3.1 - 1e-6])
    assert not varies(scores)
    assert varies(scores + np.array([0, 0, 1e-3]))
