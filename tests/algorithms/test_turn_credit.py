"""Credit per turn: by hand, against a second implementation, and turns that the loss leaves out or that cost a penalty."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline import config
from pipeline.algorithms.advantages import GROUP_EPSILON
from pipeline.algorithms.sections import GAEConfig, RewardShapingConfig
from pipeline.algorithms.token_advantages import estimate_gae
from pipeline.algorithms.turn_credit import turn_rewards
from pipeline.config import AdvantageConfig, LossConfig, PPOConfig
from pipeline.data.packing import pack
from pipeline.types import NOTHING_SAID, RolloutGroup
from tests.algorithms import reference
from tests.algorithms.groups import group_of, group_of_turns
from tests.algorithms.made import grpo, made

AGENTS = [[0.25, 0.5, 1.0], [0.25, 0.0], [0.0]]  # three episodes of three, two and one turn


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    rng, differences = np.random.default_rng(0), []
    for left_out, normalize, discount in itertools.product((True, False), (True, False), (1.0, 0.95, 0.0)):
        algorithm = credited(normalize_rewards=normalize, use_leave_one_out_baseline=left_out, turn_discount=discount)
        for size in (2, 3, 8):
            turns = [rng.normal(size=rng.integers(1, 6)).tolist() for _ in range(size)]
            right = [[0.0] * (len(of_episode) - 1) + [float(rng.integers(0, 2))] for of_episode in turns]
            for rewards in (turns, right):
                expected = reference.turn_advantages(rewards, discount, left_out, normalize)
                found = of_turns(algorithm, rewards)
                pairs = zip(found, itertools.chain(*expected), strict=True)  # leave-one-out with the deviation is unbounded
                differences += [abs(one - other) / max(1.0, abs(other)) for one, other in pairs]
    return {"GRPO, RLOO, Dr. GRPO, advantages of turns": (len(differences), max(differences), None)}


def credited(**keys):
    return grpo(**{"credit": "turn", "max_rollout_turns": 9, **keys})


def of_turns(algorithm, rewards) -> list[float]:
    """Return the advantages of all turns in float64, episode by episode."""
    group, sums = group_of_turns(rewards), np.array([sum(of_episode) for of_episode in rewards])
    return np.concatenate(list(algorithm.turn_advantages(group, sums, algorithm.advantages(group, sums)))).tolist()


def test_against_the_reference():
    ((cases, difference, _),) = largest_differences().values()
    assert cases > 500 and difference < 1e-12


def test_returns_are_compared_at_each_turn():
    """Gamma 1/2: returns of 3/4, 1/4 and 0; of 1 and 0. Nobody else has the third turn, so its episode's sums count."""
    found = of_turns(credited(normalize_rewards=False, turn_discount=0.5), AGENTS)
    assert found == [0.75 - 0.125, 1.0, 1.75 - 0.125, 0.25 - 0.375, -1.0, 0.0 - 0.5]
    found = of_turns(credited(turn_discount=0.5, use_leave_one_out_baseline=False), AGENTS)
    first, second, third = (np.std(values, ddof=1) + GROUP_EPSILON for values in ([0.75, 0.25, 0], [1, 0], [1.75, 0.25, 0]))
    expected = [(5 / 12) / first, 0.5 / second, (13 / 12) / third, (-1 / 12) / first, -0.5 / second, (-1 / 3) / first]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_equal_returns_give_no_advantage_at_their_turn():
    assert of_turns(credited(), [[1.0, 1.0], [0.0, 1.0], [0.0]])[1::2] == [0.0, 0.0]


def test_a_late_reward_is_not_credited_to_turns_before_a_bad_one():
    """Both episodes earn 1. Per episode nothing is learned; per turn the first turn of one and the second of the other is."""
    group = group_of_turns([[1.0, 0.0], [0.0, 1.0]])
    whole, by_turn = grpo(use_dynamic_sampling=True), credited(use_dynamic_sampling=True, normalize_rewards=False)
    assert whole.select([group]) == [] and by_turn.select([group, group_of_turns([[0.5, 0.5], [0.5, 0.5]])]) == [group]
    samples = by_turn.compute_advantages([group])
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0, 0, 0, 0, -1, -1], [0, 0, 0, 0, 0, 1, 1]]


ESTIMATORS = {
    "leave one out": {},
    "GRPO": {"use_leave_one_out_baseline": False},
    "REINFORCE++-baseline": {"estimator": AdvantageConfig("reinforce_plus_plus")},
    "REINFORCE++": {"estimator": AdvantageConfig("reinforce_plus_plus", minus_baseline=False)},
    "shaped": {"reward_shaping": RewardShapingConfig(True, 2, 0.3, 3), "malformed_turn_penalty": 0.1},
    "a model's scores": {"use_dynamic_sampling": True},
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_episodes_of_one_turn_have_the_same_samples_under_both_credits(name):
    rewards = [0.1, 0.7, 0.7, -1.3] if name == "a model's scores" else [1.0, 0.0, 0.3, 0.0]
    group = group_of(rewards, lengths=[2, 3, 1, 2])
    failed = replace(group.rollouts[3], failure="it hung", reward=9.0)
    for rollouts in (group.rollouts, (*group.rollouts[:3], failed), (group.rollouts[0], failed)):
        groups = [replace(group, rollouts=rollouts)]
        keys = {"turn_discount": 0.5, **ESTIMATORS[name]}
        one, other = grpo(**ESTIMATORS[name]), credited(**keys)
        assert one.select(groups) == other.select(groups)
        pairs = zip(one.compute_advantages(groups), other.compute_advantages(groups), strict=True)
        for whole, by_turn in pairs:
            for field in ("tokens", "loss_mask", "logprobs", "advantages"):
                np.testing.assert_array_equal(getattr(whole, field), getattr(by_turn, field))
            assert whole.reward == by_turn.reward


def test_reinforce_plus_plus_without_a_baseline_has_the_returns_themselves():
    algorithm = credited(estimator=AdvantageConfig("reinforce_plus_plus", minus_baseline=False), turn_discount=0.5)
    assert of_turns(algorithm, AGENTS) == [0.75, 1.0, 1.0, 0.25, 0.0, 0.0]


def thoughtful() -> RolloutGroup:
    """Return AGENTS with thoughts before each answer; the answer of the last episode could not begin after its thoughts."""
    rollouts = []
    for rollout in group_of_turns(AGENTS).rollouts:
        thoughts = [replace(turn, reward=0.0, thinking=True) for turn in rollout.turns]
        rollouts.append(replace(rollout, turns=tuple(itertools.chain(*zip(thoughts, rollout.turns, strict=True)))))
    unanswered = (replace(rollouts[2].turns[1], thinking=True),)
    return replace(group_of_turns(AGENTS), rollouts=(*rollouts[:2], replace(rollouts[2], turns=unanswered)))


def test_thoughts_belong_to_the_answer_after_them():
    algorithm, sums = credited(), np.array([1.75, 0.25, 0.0])
    episodes = algorithm.advantages(thoughtful(), sums)
    plain = [of.tolist() for of in algorithm.turn_advantages(group_of_turns(AGENTS), sums, episodes)]
    found = [of.tolist() for of in algorithm.turn_advantages(thoughtful(), sums, episodes)]
    assert found == [np.repeat(plain[0], 2).tolist(), np.repeat(plain[1], 2).tolist(), plain[2]]


def test_episodes_without_rewards_of_turns_have_theirs_in_the_last_turn():
    """The last turn has the reward of a reward model, of a broken answer, and of a buffer of an earlier version."""
    (rollout,) = group_of_turns([[0.0, 0.0, 0.0]]).rollouts
    assert turn_rewards(rollout, 2.5).tolist() == [0.0, 0.0, 2.5]
    assert turn_rewards(replace(rollout, turns=(), failure="it hung"), 0.0).tolist() == []


def test_a_failed_episode_has_no_influence_on_any_turn():
    group = group_of_turns([*AGENTS, [5.0, 5.0, 5.0]])
    hung, silent = (replace(group.rollouts[3], failure=why, reward=0.0) for why in ("it hung", NOTHING_SAID))
    failed = replace(group, rollouts=(*group.rollouts[:3], hung, replace(silent, turns=())))
    one, other = (credited().compute_advantages([of]) for of in (group_of_turns(AGENTS), failed))
    assert [sample.advantages.tolist() for sample in one] == [sample.advantages.tolist() for sample in other[:3]]
    assert not other[3].loss_mask.any() and not other[3].advantages.any()


# ---- truncated and malformed turns -----------------------------------------------------------------------------------------


def flawed() -> RolloutGroup:
    """Return AGENTS with a malformed first turn of the first episode and a truncated first turn of the second."""
    group = group_of_turns(AGENTS, [[1, 0, 0], [0, 0], [0]])
    first, second, third = group.rollouts
    cut = replace(second.turns[0], completion=replace(second.turns[0].completion, finish="length"))
    return replace(group, rollouts=(first, replace(second, turns=(cut, second.turns[1])), third))


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_masked_turns_count_for_nothing_but_the_baseline(credit):
    plain = credited(credit=credit).compute_advantages([flawed()])
    keys = {"mask_malformed_turns": True, "mask_truncated_turns": True}
    found = credited(credit=credit, **keys).compute_advantages([flawed()])
    assert len(found) == 3
    for number, (one, other) in enumerate(zip(plain, found, strict=True)):
        left_out = np.isin(np.arange(len(one.tokens)), [2, 3] if number < 2 else [])
        assert other.loss_mask.tolist() == (one.loss_mask & ~left_out).tolist()
        for field in ("advantages", "logprobs"):
            assert getattr(other, field).tolist() == np.where(left_out, 0, getattr(one, field)).tolist()


def test_penalties_are_of_their_turns():
    keys = {"malformed_turn_penalty": 0.25, "truncated_turn_penalty": 0.5, "normalize_rewards": False}
    whole = credited(credit="episode", **keys).compute_advantages([flawed()])
    assert [sample.reward for sample in whole] == [1.5, -0.25, 0.0]
    penalized = [[0.0, 0.5, 1.0], [-0.25, 0.0], [0.0]]
    (first, second, third) = credited(**keys).compute_advantages([flawed()])
    expected = of_turns(credited(normalize_rewards=False), penalized)
    found = [sample.advantages[at] for sample, places in ((first, (2, 5, 8)), (second, (2, 5)), (third, (2,))) for at in places]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_an_invalid_tool_call_has_its_own_advantage(credit):
    """As NeMo-RL's invalid_tool_call_advantage: it replaces the advantage of that turn's tokens, and nothing else."""
    plain = credited(credit=credit).compute_advantages([flawed()])
    found = credited(credit=credit, invalid_tool_call_advantage=-5.0).compute_advantages([flawed()])
    assert found[0].advantages.tolist() == [0, 0, -5, -5, 0, *plain[0].advantages[5:].tolist()]
    assert [sample.advantages.tolist() for sample in found[1:]] == [sample.advantages.tolist() for sample in plain[1:]]


# ---- with a critic ---------------------------------------------------------------------------------------------------------


def critic(gamma: float = 1.0, **keys):
    gae = GAEConfig(gae_gamma=gamma, gae_lambda=1.0, normalize_advantages=False)
    return made(PPOConfig(adv_estimator=gae, max_rollout_turns=9, num_generations_per_prompt=3, **keys), LossConfig())


def returns_of(algorithm, group) -> list[list[float]]:
    """Return the returns of each episode's tokens, from a critic whose values are 0."""
    samples = algorithm.compute_advantages([group])
    batch = pack(samples, "cpu")
    batch = algorithm.estimate(replace(batch, old_values=torch.zeros(len(batch.tokens))))
    return [part.tolist() for part in batch.returns.split(batch.lengths)]


def test_a_critic_learns_that_rewards_arrive_with_their_turns():
    """Returns to go of tokens; observations and the prompt have none. Gamma discounts by tokens."""
    found = returns_of(critic(credit="turn"), group_of_turns(AGENTS))
    assert found == [[0, 0, 1.75, 1.75, 0, 1.5, 1.5, 0, 1, 1], [0, 0, 0.25, 0.25, 0, 0, 0], [0, 0, 0, 0]]
    assert returns_of(critic(0.5, credit="turn"), group_of_turns([[1.0, 4.0]])) == [[0, 0, 1.0, 2.0, 0, 2.0, 4.0]]
    assert returns_of(critic(credit="episode"), group_of_turns(AGENTS))[0] == [0, 0, 1.75, 1.75, 0, 1.75, 1.75, 0, 1.75, 1.75]


def test_a_critics_rewards_have_penalties_and_follow_thoughts():
    penalized = critic(credit="turn", malformed_turn_penalty=0.25, truncated_turn_penalty=0.5)
    first, second, _ = returns_of(penalized, flawed())
    assert first == [0, 0, 1.5, 1.5, 0, 1.5, 1.5, 0, 1, 1] and second == [0, 0, -0.25, -0.25, 0, 0, 0]
    lost = replace(
        thoughtful(), rollouts=tuple(replace(rollout, reward=rollout.reward - 1) for rollout in thoughtful().rollouts)
    )
    first, _, unanswered = returns_of(critic(credit="turn"), lost)
    assert first == [0, 0, 0.75, 0.75, 0, 0.75, 0.75, 0, 0.5, 0.5, 0, 0.5, 0.5, 0, 0, 0, 0, 0] and unanswered == [0, 0, -1, -1]


def test_the_kl_penalty_adds_to_rewards_of_turns():
    loss = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1")
    batch = pack(critic(credit="turn").compute_advantages([group_of_turns(AGENTS)]), "cpu")
    draw = torch.Generator().manual_seed(0)
    fields = {
        name: torch.randn(len(batch.tokens), generator=draw) for name in ("old_values", "old_logprobs", "reference_logprobs")
    }
    batch = replace(batch, **fields)
    one = replace(batch, old_values=torch.zeros_like(batch.old_values), advantages=torch.zeros_like(batch.advantages))
    (whole, _), (found, _) = (estimate_gae(batch, GAEConfig(), of, True) for of in (loss, LossConfig()))
    kl, _ = estimate_gae(one, GAEConfig(), loss, True)
    torch.testing.assert_close(whole, found + kl)
    assert kl.abs().max() > 0.1


def test_a_masked_turns_reward_arrives_with_the_token_before_it():
    masked = critic(credit="turn", mask_truncated_turns=True, mask_malformed_turns=True)
    first, second, _ = returns_of(masked, flawed())
    assert first == [0, 0, 0, 0, 0, 1.5, 1.5, 0, 1, 1] and second == [0, 0, 0, 0, 0, 0, 0]  # nothing is before a first turn
    (found,) = returns_of(masked, group_of_turns([[0.25, 0.5, 1.0]], [[0, 1, 0]]))
    assert found == [0, 0, 1.75, 1.75, 0, 0, 0, 0, 1, 1]


def test_a_critic_of_episodes_of_one_turn_is_the_same_under_both_credits():
    group = group_of([1.0, 0.3, -0.7], lengths=[3, 1, 2])
    one, other = (returns_of(critic(0.9, credit=credit), group) for credit in ("episode", "turn"))
    assert one == other and math.fsum(map(sum, one)) != 0


# ---- checks ----------------------------------------------------------------------------------------------------------------

SEVERAL = ["grpo.max_rollout_turns=3", "grpo.credit=turn"]


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["grpo.credit=turn"], "grpo.credit", "got turn with grpo.max_rollout_turns=1"),
        ([*SEVERAL, "grpo.adv_estimator.name=gdpo"], "grpo.credit", "several rewards of the whole episode"),
        ([*SEVERAL, "grpo.adv_estimator.name=opd"], "grpo.credit", "log-probs of teachers"),
        ([*SEVERAL, "grpo.reward_scaling.enabled=true"], "grpo.credit", "got turn with grpo.reward_scaling"),
        (["grpo.turn_discount=0.5"], "grpo.turn_discount", "Try grpo.credit=turn"),
        (["grpo.malformed_turn_penalty=1", "grpo.adv_estimator.name=gdpo"], "grpo.malformed_turn_penalty", "expected 0"),
        (
            ["grpo.invalid_tool_call_advantage=-5", "grpo.adv_estimator.name=reinforce_plus_plus"],
            "grpo.invalid_tool_call_advantage",
            "Try grpo.malformed_turn_penalty",
        ),
        (
            ["grpo.invalid_tool_call_advantage=-5", "grpo.mask_malformed_turns=true"],
            "grpo.invalid_tool_call_advantage",
            "which leaves these turns out",
        ),
        (
            ["grpo.invalid_tool_call_advantage=-5", "grpo.advantage_clip_low=-2"],
            "grpo.invalid_tool_call_advantage",
            "within grpo.advantage_clip_low",
        ),
    ],
)
def test_contradictions_are_named(overrides, key, says):
    problems = [problem for problem in config.inspect("tiny_grpo", overrides).problems if problem.key == key]
    assert len(problems) == 1 and says in problems[0].message


def test_credit_per_turn_of_a_usual_recipe_has_no_problem():
    assert not config.inspect("tiny_grpo", [*SEVERAL, "grpo.turn_discount=0.95"]).problems
