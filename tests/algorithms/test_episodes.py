"""Episodes of several turns, in which only the policy's tokens count, and episodes that failed in their environment.

The other files compare masked losses with their references; these tests start from rollouts, by hand.

That every loss passes over holes in its mask, the other files show against their references; here it is done by hand, from
rollouts on.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.advantages import make_sample
from pipeline.algorithms.loss import sequence_log_ratios
from pipeline.algorithms.reductions import masked_share, sequence_means
from pipeline.algorithms.sections import GAEConfig, RewardShapingConfig
from pipeline.algorithms.token_advantages import estimate_gae, subtract_future_kl
from pipeline.config import AdvantageConfig, DistillationConfig, LossConfig, PolicyConfig, PPOConfig
from pipeline.data.batches import split_batch
from pipeline.data.packing import pack
from pipeline.types import (
    Completion,
    DataParallelRank,
    GlobalCounts,
    PackedBatch,
    Prompt,
    Rollout,
    RolloutGroup,
    Turn,
    VersionSpan,
)
from tests.algorithms.groups import group_of
from tests.algorithms.made import grpo, made

PROMPT = Prompt(0, np.array([5, 6], np.int32), "math", {})


def turn(said: list[int], told: list[int], logprobs: list[float], finish: str = "stop") -> Turn:
    completion = Completion(
        "0/0", np.array(said, np.int32), np.array(logprobs, np.float32), (VersionSpan(0, len(said)),), finish
    )
    return Turn(completion, np.array(told, np.int32))


EPISODE = Rollout((turn([7, 2], [9, 8, 9], [-0.1, -0.2]), turn([4], [], [-0.4])), reward=1.0)
HOLES = [False, False, True, True, False, False, False, True]


def packed(**fields: list[float]) -> PackedBatch:
    """Return the episode after one of a single turn, so that a sum across their boundary would be noticed."""
    before = Rollout((turn([7], [], [-0.7]),), reward=5.0)
    batch = pack([make_sample(PROMPT, before, 3.0, 5.0), make_sample(PROMPT, EPISODE, 2.0, 1.0)], "cpu")
    return replace(batch, **{name: torch.tensor([0.0] * 3 + values) for name, values in fields.items()})


def episodes(values: torch.Tensor) -> list[float]:
    return values[3:].tolist()


def test_a_sample_counts_sampled_tokens():
    found = make_sample(PROMPT, EPISODE, 2.0, 1.0)
    assert found.tokens.tolist() == [5, 6, 7, 2, 9, 8, 9, 4] and found.loss_mask.tolist() == HOLES
    assert found.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, 0, 0, -0.4])
    assert found.advantages.tolist() == [0, 0, 2, 2, 0, 0, 0, 2]
    batch = packed()
    assert episodes(batch.loss_mask) == HOLES and batch.positions.tolist() == [0, 1, 2, *range(8)]
    (update,), *_ = split_batch([found, found], PolicyConfig(max_total_sequence_length=16), [DataParallelRank(0, 1)], 2)
    assert update.counts == GlobalCounts(tokens=6, sequences=2, good=2)


def test_gae_skips_observations_between_turns():
    """A value follows each token: the one before the second turn's first token is after the observation's last token."""
    values = [0.0, 0.5, 0.6, 9.0, 9.0, 9.0, 0.8, 9.0]  # what any 9 enters is wrong
    gamma, decay = 0.9, 0.9 * 0.8
    advantages, returns = estimate_gae(packed(old_values=values), GAEConfig(gae_gamma=gamma, gae_lambda=0.8), LossConfig())
    third = 1.0 - 0.8
    second = gamma * 0.8 - 0.6 + decay * third
    first = gamma * 0.6 - 0.5 + decay * second
    assert episodes(advantages) == pytest.approx([0, 0, first, second, 0, 0, 0, third])
    assert episodes(returns) == pytest.approx([0, 0, first + 0.5, second + 0.6, 0, 0, 0, 1.0])


def test_an_adaptive_lambda_counts_the_policys_tokens():
    values = [0.0, 0.5, 0.6, 9.0, 9.0, 9.0, 0.8, 9.0]
    adaptive = estimate_gae(packed(old_values=values), GAEConfig(length_adaptive_alpha=1.0), LossConfig())
    fixed = estimate_gae(packed(old_values=values), GAEConfig(gae_lambda_policy=1 - 1 / 3), LossConfig())
    assert episodes(adaptive[0]) == pytest.approx(episodes(fixed[0]))


def test_future_kl_is_of_the_policys_tokens():
    config = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1")
    batch = packed(old_logprobs=[9, 9, 1, 2, 9, 9, 9, 4], reference_logprobs=[-9, -9, 0, 0, -9, -9, -9, 0])
    assert episodes(subtract_future_kl(batch, config)) == pytest.approx([0, 0, 2 - 3.5, 2 - 3.0, 0, 0, 0, 2 - 2.0])


def test_means_and_ratios_are_of_the_policys_tokens():
    batch = packed()
    values = torch.tensor([9.0, 9.0, 2.0, 9.0, 9.0, 1.0, 2.0, torch.inf, torch.nan, 9.0, 6.0])
    assert sequence_means(values, batch).tolist() == [2.0, 3.0]
    assert sequence_log_ratios(values, batch)[batch.loss_mask].tolist() == [2.0, 3.0, 3.0, 3.0]  # GSPO's: 3 tokens, not 6
    assert masked_share(values, batch, GlobalCounts(4, 2)).item() == 11 / 4
    assert masked_share(values, batch, GlobalCounts(4, 2), token_level=False).item() == 5 / 2


def test_lengths_count_sampled_tokens():
    """Check that 40 tokens of observations do not make an episode longer for the length penalty."""
    told = Rollout((turn([7, 2], [9] * 40, [-0.1, -0.2]), turn([4], [], [-0.4])), reward=1.0)
    alone = Rollout((turn([7, 2, 4], [], [-0.1, -0.2, -0.4]),), reward=1.0)
    shaping = RewardShapingConfig(enabled=True, max_response_length=4, overlong_buffer_length=2)
    samples = grpo(reward_shaping=shaping).compute_advantages([RolloutGroup(PROMPT, (told, alone))])
    assert [one.reward for one in samples] == [0.5, 0.5]


def test_an_episode_is_overlong_if_its_last_turn_was_truncated():
    cut_before = Rollout((turn([7, 2], [9], [-0.1, -0.2], "length"), turn([4], [], [-0.4])), reward=1.0)
    cut = Rollout((turn([7, 2], [9], [-0.1, -0.2]), turn([4], [], [-0.4], "length")), reward=0.0)
    samples = grpo(overlong_filtering=True).compute_advantages([RolloutGroup(PROMPT, (cut_before, cut))])
    assert [int(one.loss_mask.sum()) for one in samples] == [3, 0]


# ---- failed episodes -------------------------------------------------------------------------------------------------------


def failed(group: RolloutGroup, *numbers: int, reward: float = 0.0) -> RolloutGroup:
    """Return the group with these of its episodes failed; their rewards are meaningless."""
    rollouts = [
        replace(rollout, failure="the tool hung", reward=reward) if i in numbers else rollout
        for i, rollout in enumerate(group.rollouts)
    ]
    return replace(group, rollouts=tuple(rollouts))


ESTIMATORS = {
    "GRPO": {"use_leave_one_out_baseline": False},
    "leave one out": {},
    "Dr. GRPO": {"normalize_rewards": False, "use_leave_one_out_baseline": False},
    "REINFORCE++": {"estimator": AdvantageConfig(name="reinforce_plus_plus", minus_baseline=True)},
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 1e6, float("nan")])
def test_other_episodes_advantages_ignore_a_failed_one(name, reward):
    algorithm = grpo(**ESTIMATORS[name])
    alone = algorithm.compute_advantages([group_of([1.0, 0.0, 0.25])])
    found = algorithm.compute_advantages([failed(group_of([1.0, 9.0, 0.0, 9.0, 0.25]), 1, 3, reward=reward)])
    assert len(found) == 5
    for one, other in zip([found[0], found[2], found[4]], alone, strict=True):
        assert one.advantages.tolist() == other.advantages.tolist() != [0, 0, 0, 0]
    for one in (found[1], found[3]):
        assert not one.loss_mask.any() and not one.advantages.any() and one.reward == 0.0 and not one.logprobs.any()


def test_dynamic_sampling_ignores_failed_episodes():
    algorithm = grpo(use_dynamic_sampling=True)
    groups = [group_of([1.0, 1.0, 0.0]), group_of([1.0, 0.0, 0.0]), group_of([1.0, 0.0]), group_of([1.0, 1.0])]
    chosen = [failed(groups[0], 2), failed(groups[1], 2), failed(groups[2], 0, 1), failed(groups[3], 0)]
    assert algorithm.select(chosen) == [chosen[1]]  # all right; one of two; nothing; one answer alone
    assert algorithm.select(groups[:1]) == groups[:1]


def algorithms() -> dict:
    return {
        "GRPO": grpo(),
        "REINFORCE++": grpo(estimator=AdvantageConfig(name="reinforce_plus_plus", minus_baseline=False)),
        "PPO": made(PPOConfig(), LossConfig(), updates=1),
        "distillation": made(DistillationConfig(), LossConfig()),
    }


@pytest.mark.parametrize("name", ["GRPO", "REINFORCE++", "PPO", "distillation"])
@pytest.mark.filterwarnings("error")
def test_a_group_of_failed_episodes_contributes_nothing(name):
    """It keeps its places among the samples of an update, and counts for nothing there."""
    algorithm = algorithms()[name]
    good, bad = group_of([1.0, 0.0]), failed(group_of([1.0, 0.0]), 0, 1)
    samples = algorithm.compute_advantages([good, bad])
    assert [int(one.loss_mask.sum()) for one in samples] == [2, 2, 0, 0]
    (update,), *_ = split_batch(samples, PolicyConfig(max_total_sequence_length=16), [DataParallelRank(0, 1)], 4)
    assert (update.counts.tokens, update.counts.sequences) == (4, 2)
    if name == "PPO":
        batch = replace(pack(samples, "cpu"), old_values=torch.ones(sum(len(one.tokens) for one in samples)))
        estimated = algorithm.estimate(batch)
        assert not estimated.advantages[~batch.loss_mask].any() and not estimated.returns[~batch.loss_mask].any()
