"""GRPO: advantages, samples and loss by hand, against a second implementation, and however the tokens are cut.

Ours was once compared with TRL 1.16's own code (`GRPOTrainer._compute_loss`, and its importance-sampling ratios) on the same
log-probs: losses and gradients of grpo, dapo, bnpo, cispo, sequence-level ratios, delta, the entropy bonus, the corrected KL
and the four vllm_importance_sampling_modes were equal to 3e-16. NeMo-RL's `ClippedPGLossFn` gave the same for all recipes' keys
that these tests go through, to the 1e-8 that it adds to lengths; so did its GAE and its value loss.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from pipeline.algorithms.advantages import GROUP_EPSILON, group_advantages
from pipeline.algorithms.base import Needs
from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.loss import policy_loss
from pipeline.config import AdvantageConfig, GRPOConfig, LossConfig
from pipeline.types import PackedBatch
from tests.algorithms import reference
from tests.algorithms.groups import group_of
from tests.algorithms.made import made
from tests.algorithms.sampled import (
    assert_gradcheck,
    assert_however_cut,
    gradient_of,
    largest_difference,
    outputs_of,
    random_sampled,
)

CONFIGS = {
    "the paper's": LossConfig(token_level_loss=False, reference_policy_kl_penalty=0.04),
    "token-level": LossConfig(),
    "dual clip": LossConfig(ratio_clip_c=1.5),
    "forced ratio": LossConfig(force_on_policy_ratio=True),
    "entropy bonus": LossConfig(entropy_coeff=0.1),
    "entropy bonus, by sequence": LossConfig(entropy_coeff=0.1, token_level_loss=False),
}


def grpo(loss: LossConfig | None = None, updates: int = 1, estimator: AdvantageConfig | None = None, **keys) -> GRPO:
    estimator = estimator or AdvantageConfig(normalize_rewards=True, use_leave_one_out_baseline=True)
    return made(GRPOConfig(adv_estimator=estimator, **keys), loss or LossConfig(), updates=updates)


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    found = {f"GRPO, {name}": largest_difference(config) for name, config in CONFIGS.items()}
    rng, differences = np.random.default_rng(0), []
    for leave_one_out, normalize, size in itertools.product((True, False), (True, False), (2, 3, 5, 16)):
        for rewards in (rng.normal(size=size), rng.integers(0, 2, size).astype(float), np.full(size, 0.7)):
            expected = reference.group_advantages(rewards, leave_one_out, normalize)
            differences.append(np.abs(group_advantages(rewards, leave_one_out, normalize) - expected).max())
    return found | {"GRPO, advantages of groups": (len(differences), max(differences), None)}


def test_against_the_reference():
    for name, (cases, loss, gradient) in largest_differences().items():
        assert cases >= 8 and loss < 1e-12 and (gradient is None or gradient < 1e-12), name


# ---- advantages -------------------------------------------------------------------------------------------------------


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
    """The sample that is right alone sees others that do not vary, so it is not divided, not even by what is left of their
    deviation after rounding; the others see (1, 0, 0)."""
    advantages = group_advantages([value + 1, value, value, value], True, normalize=True)
    expected = -(1 / 3) / (math.sqrt(1 / 3) + GROUP_EPSILON)
    np.testing.assert_allclose(advantages, [1.0, expected, expected, expected], rtol=1e-12)


@pytest.mark.parametrize(("leave_one_out", "normalize"), list(itertools.product([True, False], repeat=2)))
def test_equal_rewards_give_no_advantage(leave_one_out, normalize):
    for size in (1, 2, 5, 7):
        assert not group_advantages([0.7] * size, leave_one_out, normalize).any()


def test_advantages_without_scale_are_shift_invariant_and_sum_to_zero():
    rewards = np.random.default_rng(0).normal(size=8)
    for leave_one_out in (True, False):
        one = group_advantages(rewards, leave_one_out, normalize=False)
        np.testing.assert_allclose(one, group_advantages(rewards + 3, leave_one_out, normalize=False), atol=1e-12)
        assert abs(one.sum()) < 1e-12


# ---- samples ----------------------------------------------------------------------------------------------------------


def test_credit_masks_the_prompt_and_spreads_the_advantage():
    estimator = AdvantageConfig(normalize_rewards=False, use_leave_one_out_baseline=True)
    first, second = grpo(estimator=estimator).compute_advantages([group_of([1.0, 0.25], lengths=[2, 1])])
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert first.loss_mask.tolist() == [False, False, True, True]
    np.testing.assert_allclose(first.logprobs, [0, 0, -0.1, -0.2], rtol=1e-6)
    assert first.advantages.tolist() == [0, 0, 0.75, 0.75] and first.reward == 1.0
    assert second.advantages.tolist() == [0, 0, -0.75] and second.reward == 0.25


def test_needs_follow_from_the_recipe():
    assert grpo().needs == Needs(truncated=True)
    assert grpo(updates=2).needs == Needs(truncated=True, old=True)
    assert grpo(LossConfig(force_on_policy_ratio=True)).needs == Needs(truncated=True)
    assert grpo(LossConfig(reference_policy_kl_penalty=0.1)).needs == Needs(truncated=True, reference=True)
    assert (
        grpo(LossConfig(log_entropy=True)).needs
        == grpo(LossConfig(entropy_coeff=0.1)).needs
        == Needs(truncated=True, entropy=True)
    )
    assert grpo(seq_logprob_error_threshold=2.0).needs == Needs(truncated=True, old=True, estimates=True)
    forced = LossConfig(force_on_policy_ratio=True)
    assert grpo(forced, seq_logprob_error_threshold=2.0).needs == Needs(truncated=True, old=True, estimates=True)
    assert grpo().trains(0) == ("policy",)


# ---- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_however_sequences_are_cut_and_ordered(name):
    config = CONFIGS[name]
    packed = random_sampled(1, reference=config.reference_policy_kl_penalty != 0)
    assert_however_cut(partial(policy_loss, config), packed, entropy=config.entropy_coeff != 0)


@pytest.mark.parametrize("name", ["token-level", "dual clip", "entropy bonus, by sequence"])
def test_gradcheck(name):
    assert_gradcheck(partial(policy_loss, CONFIGS[name]), random_sampled(2), entropy=CONFIGS[name].entropy_coeff != 0)


def by_hand(config: LossConfig, ratios: list[float], advantages: list[float]) -> tuple[float, list[float], dict[str, float]]:
    """One sequence of these tokens after one that does not count: loss, gradient, metrics."""
    packed = random_sampled(0, lengths=(len(ratios) + 1,))
    old = torch.full((len(ratios) + 1,), math.log(0.25), dtype=torch.float64)
    with torch.no_grad():
        packed.leaf.copy_(old + torch.tensor([1.0, *ratios], dtype=torch.float64).log())
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False] + [True] * len(ratios)),
        old_logprobs=old,
        generate_logprobs=old,
        advantages=torch.tensor([0.0, *advantages], dtype=torch.float64),
    )
    packed = replace(packed, batch=batch)
    out = policy_loss(config, outputs_of(packed), batch, packed.counts)
    metrics = {name: value.item() for name, value in out.metrics.items() if value.numel() == 1}
    return out.loss.item(), gradient_of(out.loss, packed)[1:].tolist(), metrics


def test_clipped_tokens_have_no_gradient():
    """Raised and praised, or lowered and blamed, is clipped."""
    loss, gradient, metrics = by_hand(LossConfig(), [1.8, 1.8, 0.2, 0.2], [1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx((-1.2 + 1.8 - 0.2 + 0.8) / 4, abs=1e-15)
    assert gradient == pytest.approx([0.0, 1.8 / 4, -0.2 / 4, 0.0], abs=1e-15)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_max"] == pytest.approx(1.8) and metrics["ratio_min"] == pytest.approx(0.2)


def test_dual_clip_by_hand():
    """It bounds what a blamed token costs, here by 3; praised ones are bounded already."""
    loss, gradient, metrics = by_hand(LossConfig(ratio_clip_c=3.0), [4.0, 2.5, 4.0], [-1.0, -1.0, 1.0])
    assert loss == pytest.approx((3.0 + 2.5 - 1.2) / 3, abs=1e-15)
    assert gradient == pytest.approx([0.0, 2.5 / 3, 0.0], abs=1e-15)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)


def test_token_and_sequence_level_by_hand():
    """Sequences of 1 and 3 tokens whose advantages are 1 and -1; the ratio is 1."""
    packed = random_sampled(0, old=False, lengths=(2, 4))
    mask = torch.tensor([False, True, False, True, True, True])
    batch = replace(packed.batch, loss_mask=mask, advantages=torch.tensor([0, 1.0, 0, -1, -1, -1], dtype=torch.float64))
    packed = replace(packed, batch=batch)
    by_token = policy_loss(LossConfig(), outputs_of(packed), batch, packed.counts)
    assert by_token.loss.item() == (-1 + 3) / 4
    assert gradient_of(by_token.loss, packed).tolist() == [0, -0.25, 0, 0.25, 0.25, 0.25]
    by_sequence = policy_loss(LossConfig(token_level_loss=False), outputs_of(packed), batch, packed.counts)
    assert by_sequence.loss.item() == 0
    torch.testing.assert_close(
        gradient_of(by_sequence.loss, packed), torch.tensor([0, -1 / 2, 0, 1 / 6, 1 / 6, 1 / 6], dtype=torch.float64)
    )


@pytest.mark.parametrize("forced", [False, True])
def test_on_policy_gradient_is_reinforce(forced):
    """With pi_old = pi the gradient is that of -A log pi, whatever the clip; the ratio is 1 and ppo_kl 0. Log-probs of an old
    policy change nothing where the ratio is forced."""
    packed = random_sampled(3, old=forced)
    config = LossConfig(force_on_policy_ratio=forced, ratio_clip_min=0.0, ratio_clip_max=0.0)
    out = policy_loss(config, outputs_of(packed), packed.batch, packed.counts)
    reinforce = policy_loss(LossConfig(disable_ppo_ratio=True), outputs_of(packed), packed.batch, packed.counts)
    expected = -packed.batch.advantages / packed.counts.tokens
    torch.testing.assert_close(gradient_of(out.loss, packed), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient_of(reinforce.loss, packed), expected, rtol=0, atol=1e-15)
    assert out.metrics["ppo_kl"] == out.metrics["clip_fraction"] == 0
    assert out.metrics["ratio_max"] == out.metrics["ratio_min"] == 1


def test_first_of_several_updates_is_on_policy():
    """An old policy that is the policy: the same, to the last bit."""
    packed = random_sampled(4, old=False)
    batch = replace(packed.batch, old_logprobs=packed.leaf.detach().clone())
    one = policy_loss(LossConfig(), outputs_of(packed), packed.batch, packed.counts)
    other = policy_loss(LossConfig(), outputs_of(packed), batch, packed.counts)
    assert one.loss == other.loss and other.metrics["ppo_kl"] == 0 and other.metrics["ratio_max"] == 1
    assert torch.equal(gradient_of(one.loss, packed), gradient_of(other.loss, packed))


def test_entropy_is_taken_off_the_loss():
    packed = random_sampled(5)
    without = policy_loss(LossConfig(), outputs_of(packed), packed.batch, packed.counts)
    logged = policy_loss(LossConfig(log_entropy=True), outputs_of(packed, entropy=True), packed.batch, packed.counts)
    bonus = policy_loss(LossConfig(entropy_coeff=0.5), outputs_of(packed, entropy=True), packed.batch, packed.counts)
    mean = packed.leaf.detach().square()[packed.batch.loss_mask].mean()
    assert "entropy" not in without.metrics and logged.loss == without.loss
    assert logged.metrics["entropy"].item() == pytest.approx(mean.item())
    assert bonus.loss.item() == pytest.approx((without.loss - 0.5 * mean).item())


def test_approximate_entropy_is_the_entropy_over_tokens_drawn_from_the_generate_ranks():
    """Every token of a vocabulary once, weighed by how likely it was drawn."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    policy, generate = logits.log_softmax(-1)
    packed = random_sampled(0, old=False, lengths=(7,))
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False] + [True] * 6),
        generate_logprobs=torch.cat([torch.zeros(1), generate]),
    )
    entropies = []
    for i in range(6):
        with torch.no_grad():
            packed.leaf[1:] = policy[i]
        one = replace(batch, generate_logprobs=torch.full((7,), generate[i].item(), dtype=torch.float64))
        out = policy_loss(LossConfig(), outputs_of(packed), one, packed.counts)
        entropies.append(generate[i].exp() * out.metrics["approx_entropy"] * packed.counts.tokens / 6)
    assert sum(entropies).item() == pytest.approx(-(policy.exp() * policy).sum().item())


def test_advantages_are_clipped_where_they_are_final():
    packed = random_sampled(6)
    algorithm = grpo(advantage_clip_low=-0.5, advantage_clip_high=0.25)
    clipped = replace(packed.batch, advantages=packed.batch.advantages.clamp(-0.5, 0.25))
    out = algorithm.losses["policy"](outputs_of(packed), packed.batch, packed.counts)
    assert out.loss == policy_loss(LossConfig(), outputs_of(packed), clipped, packed.counts).loss
    assert out.loss != grpo().losses["policy"](outputs_of(packed), packed.batch, packed.counts).loss


def test_entries_outside_the_mask_do_not_matter():
    """`random_sampled` has infinities there, in all that generate, old and reference policies say."""
    packed = random_sampled(7, reference=True)
    config = LossConfig(
        reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True, use_on_policy_kl_approximation=True
    )
    fields = ("generate_logprobs", "old_logprobs", "reference_logprobs")
    clean = {name: torch.where(packed.batch.loss_mask, getattr(packed.batch, name), 0.0) for name in fields}
    out = policy_loss(config, outputs_of(packed), packed.batch, packed.counts)
    expected = policy_loss(config, outputs_of(packed), replace(packed.batch, **clean), packed.counts)
    assert out.loss == expected.loss and out.loss.isfinite()
    assert torch.equal(gradient_of(out.loss, packed), gradient_of(expected.loss, packed))
    assert all(torch.equal(out.metrics[name], value) for name, value in expected.metrics.items())


def test_a_batch_that_does_not_count_has_no_share():
    packed = random_sampled(8)
    batch: PackedBatch = replace(packed.batch, loss_mask=torch.zeros_like(packed.batch.loss_mask))
    out = policy_loss(LossConfig(token_level_loss=False), outputs_of(packed), batch, packed.counts)
    assert out.loss == 0 and not gradient_of(out.loss, packed).any()
