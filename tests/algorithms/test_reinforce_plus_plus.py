"""REINFORCE++: rewards minus the future KL, standardized over all tokens of a step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.algorithm import Needs
from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.token_advantages import moments, normalization, standardize
from pipeline.config import AdvantageConfig, LossConfig
from pipeline.types import PackedBatch
from tests.algorithms import reference
from tests.algorithms.groups import group_of
from tests.algorithms.made import grpo
from tests.algorithms.packed import Packed, piece_of
from tests.algorithms.sampled import CUTS, assert_split_invariant, random_sampled

IN_REWARD = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.3, reference_policy_kl_type="k2")
CONFIGS = {
    "no KL": LossConfig(),
    "k1 in the reward": replace(IN_REWARD, reference_policy_kl_type="k1", kl_input_clamp_value=0.5),
    "k2 in the reward": IN_REWARD,
    "k3 in the reward": replace(IN_REWARD, reference_policy_kl_type="k3", kl_output_clamp_value=0.05),
}


def algorithm(loss: LossConfig, minus_baseline: bool = True) -> GRPO:
    return grpo(loss, estimator=AdvantageConfig(name="reinforce_plus_plus", minus_baseline=minus_baseline))


def sampled(seed: int) -> tuple[Packed, np.ndarray]:
    """Return a batch whose tokens have their sequence's advantage, as `compute_advantages` sets it."""
    packed = random_sampled(seed, reference=True)
    rewards = np.random.default_rng(seed).normal(size=len(packed.batch.lengths))
    advantages = torch.tensor(np.repeat(rewards, packed.batch.lengths))
    return replace(
        packed, batch=replace(packed.batch, advantages=torch.where(packed.batch.loss_mask, advantages, 0.0))
    ), rewards


def estimated(loss: LossConfig, batches: list[PackedBatch]) -> list[PackedBatch]:
    """Return the batches that a step of these microbatches on one rank trains on."""
    found = [algorithm(loss).estimate(batch) for batch in batches]
    to = normalization([[moments(found)]], "biased")
    return [standardize(batch, to) for batch in found]


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    found = {}
    for name, config in CONFIGS.items():
        differences = []
        for seed in range(8):
            packed, rewards = sampled(seed)
            expected = reference.reinforce_plus_plus(config, packed, rewards)
            differences.append((estimated(config, [packed.batch])[0].advantages - expected).abs().max().item())
        found[f"REINFORCE++, {name}, advantages"] = len(differences), max(differences), None
    return found


def test_against_the_reference():
    differences = largest_differences()
    assert len(differences) == 4
    for name, (_, difference, _) in differences.items():
        assert difference < 1e-12, name


@pytest.mark.parametrize("name", CONFIGS)
def test_the_split_and_order_of_sequences_do_not_matter(name):
    packed, _ = sampled(1)
    whole = estimated(CONFIGS[name], [packed.batch])[0].advantages
    for cut in CUTS:
        batches = estimated(CONFIGS[name], [piece_of(packed, members).batch for members in cut])
        for members, batch in zip(cut, batches, strict=True):
            expected = piece_of(replace(packed, batch=replace(packed.batch, advantages=whole)), members).batch.advantages
            torch.testing.assert_close(batch.advantages[batch.loss_mask], expected[batch.loss_mask], rtol=0, atol=1e-13)


def test_the_split_does_not_change_the_loss():
    packed, _ = sampled(2)
    packed = replace(packed, batch=estimated(IN_REWARD, [packed.batch])[0])
    assert_split_invariant(algorithm(IN_REWARD).losses["policy"], packed)


def test_future_kl_by_hand():
    """With k1 of 0.5, 0 and -0.25 at beta 2, each token counts its own KL and all that follows."""
    packed = random_sampled(0, reference=True, lengths=(5,))
    old = torch.full((5,), -1.0, dtype=torch.float64)
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False, True, False, True, True]),
        advantages=torch.tensor([0.0, 1, 0, 1, 1], dtype=torch.float64),
        old_logprobs=old,
        reference_logprobs=old - torch.tensor([9.0, 0.5, 9.0, 0.0, -0.25]),
    )
    config = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=2.0, reference_policy_kl_type="k1")
    assert algorithm(config).estimate(batch).advantages.tolist() == [0.0, 1 - 2 * 0.25, 0.0, 1 + 2 * 0.25, 1 + 2 * 0.25]


def test_advantages_are_standardized():
    packed, _ = sampled(3)
    found = estimated(IN_REWARD, [packed.batch])[0]
    counted = found.advantages[found.loss_mask]
    assert counted.mean().item() == pytest.approx(0, abs=1e-14)
    assert counted.var(correction=0).item() == pytest.approx(1)


def test_with_and_without_the_baseline():
    group = group_of([1.0, 0.0, 0.5])
    for minus_baseline, expected in ((True, [0.5, -0.5, 0.0]), (False, [1.0, 0.0, 0.5])):
        samples = algorithm(LossConfig(), minus_baseline).compute_advantages([group])
        assert [sample.advantages[-1] for sample in samples] == expected


def test_needs_follow_from_the_recipe():
    assert algorithm(LossConfig()).needs == Needs(truncated=True, estimates=True, standardized="biased")
    assert algorithm(IN_REWARD).needs == Needs(truncated=True, old=True, reference=True, estimates=True, standardized="biased")
