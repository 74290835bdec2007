"""GDPO: by hand, over a whole step, with answers that have no score, and the checks of its recipe."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pipeline import config
from pipeline.algorithms.advantages import GROUP_EPSILON
from pipeline.config import AdvantageConfig, EnvironmentConfig
from pipeline.config.environments import RewardConfig
from pipeline.types import RolloutGroup
from tests.algorithms.groups import group_of_several
from tests.algorithms.made import grpo

TWO = {"math": EnvironmentConfig(rewards=[RewardConfig("my.right"), RewardConfig("my.form", 0.5)])}
SOLVED = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}]  # by the sum, of equal weights, the same
HARD = [{"right": 0.0, "form": 1.0}, {"right": 0.0, "form": 0.0}, {"right": 0.0, "form": 1.0}, {"right": 1.0, "form": 1.0}]


def gdpo(env=TWO, **keys):
    return grpo(estimator=AdvantageConfig("gdpo"), env=env, use_leave_one_out_baseline=False, **keys)


def of_step(groups, **keys):
    """Return the advantages of each group."""
    samples = iter(gdpo(**keys).compute_advantages(groups))
    return [[float(next(samples).advantages[-1]) for _ in group.rollouts] for group in groups]


def changed(group, number, **fields):
    rollouts = list(group.rollouts)
    rollouts[number] = replace(rollouts[number], **fields)
    return RolloutGroup(group.prompt, tuple(rollouts))


def test_by_hand():
    """Two answers of one reward each: (1 - 0.5) +- of deviation 1/sqrt 2, once with weight 1 and once with -0.5."""
    half = 0.5 / (math.sqrt(0.5) + GROUP_EPSILON)
    sums = [half - 0.5 * half, -half + 0.5 * half, 0.0, 0.0]  # the second group's rewards do not vary
    deviation = math.sqrt(sum(value * value for value in sums) / 3)
    found = of_step([group_of_several(SOLVED), group_of_several([{"right": 1.0, "form": 1.0}] * 2)])
    np.testing.assert_allclose(np.concatenate(found), np.array(sums) / deviation, rtol=1e-6)


def test_the_sum_is_normalized_over_the_step_and_not_over_a_group():
    found = np.concatenate(of_step([group_of_several(SOLVED), group_of_several(HARD)]))
    assert abs(found.mean()) < 1e-6 and abs(found.std(ddof=1) - 1) < 1e-6
    alone = np.concatenate([of_step([group_of_several(rewards)])[0] for rewards in (SOLVED, HARD)])
    assert np.abs(found - alone).max() > 0.1


def test_the_order_of_groups_does_not_matter():
    first, second = of_step([group_of_several(SOLVED), group_of_several(HARD)])
    assert of_step([group_of_several(HARD), group_of_several(SOLVED)]) == [second, first]


def test_an_episode_without_a_score_has_no_influence():
    """The others have the advantages of a step without it, and it has none."""
    group, failed = group_of_several(HARD), {"failure": "a judge is down", "metrics": {}, "reward": 0.0}
    without = RolloutGroup(group.prompt, group.rollouts[:3])
    found, other = of_step([changed(group, 3, **failed), group_of_several(SOLVED)])
    expected = of_step([without, group_of_several(SOLVED)])
    assert found == [*expected[0], 0.0] and other == expected[1]


def test_an_answer_that_broke_its_environment_gets_broken_reward_for_each():
    """-0.75 of weights 1 and 0.5 is -0.5 for each."""
    broke = changed(group_of_several(HARD), 3, broke="it raised", metrics={}, reward=-0.75)
    as_scored = [*HARD[:3], {"right": -0.5, "form": -0.5}]
    assert of_step([broke]) == of_step([group_of_several(as_scored)])


def test_a_reward_that_does_not_apply_is_left_out_of_its_group():
    """`form` applies to the first two answers alone: for the others it adds nothing, and does not shift its mean."""
    rewards = [{"right": 1.0, "form": 1.0}, {"right": 0.0, "form": 0.0}, {"right": 1.0}, {"right": 0.0}]
    right = 0.5 / (math.sqrt(1 / 3) + GROUP_EPSILON)
    form = 0.5 / (math.sqrt(1 / 2) + GROUP_EPSILON)
    sums = np.array([right + 0.5 * form, -right - 0.5 * form, right, -right])
    np.testing.assert_allclose(of_step([group_of_several(rewards)])[0], sums / sums.std(ddof=1), rtol=1e-6)


def test_rewards_of_a_users_class_have_weight_1():
    """Its metrics `reward/NAME` are the rewards. A single one is refused when the first step has it."""
    own = {"math": EnvironmentConfig(kind="my.Environment")}
    ones = {"math": EnvironmentConfig(rewards=[RewardConfig("my.right"), RewardConfig("my.form")])}
    assert of_step([group_of_several(HARD)], env=own) == of_step([group_of_several(HARD)], env=ones)
    with pytest.raises(ValueError, match=r"env\.math: got 1 rewards \(right\); expected at least two"):
        of_step([group_of_several([{"right": 1.0}, {"right": 0.0}])], env=own)


def test_dynamic_sampling_keeps_a_group_in_which_one_reward_varies():
    """GRPO drops the group whose sum does not vary; GDPO learns from it."""
    groups = [group_of_several(SOLVED), group_of_several([{"right": 1.0, "form": 0.0}] * 2)]
    assert gdpo(use_dynamic_sampling=True).select(groups) == groups[:1]
    assert grpo(use_dynamic_sampling=True).select(groups) == []


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ([], "grpo.adv_estimator.name", "got gdpo, but env.addition has one reward; expected at least two"),
        (
            ["env.addition={_override_: true, rewards: [{fn: exact_match}, {fn: math}]}", "grpo.reward_shaping.enabled=true"],
            "grpo.reward_shaping.enabled",
            "got true with grpo.adv_estimator.name=gdpo",
        ),
    ],
)
def test_what_gdpo_needs(overrides, key, says):
    problems = {
        problem.key: problem for problem in config.inspect("tiny_grpo", ["grpo.adv_estimator.name=gdpo", *overrides]).problems
    }
    assert says in problems[key].message
