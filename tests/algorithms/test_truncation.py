"""The policy's loss where sampling is truncated: tokens that the train ranks exclude, and the KL of whole distributions."""

from dataclasses import replace

import pytest
import torch

from pipeline.algorithms.loss import kl_in_reward, mask_mismatched_sequences, mismatch_metrics, policy_loss
from pipeline.config import GRPOConfig, LossConfig
from pipeline.types import Outputs
from tests.algorithms.made import made
from tests.algorithms.packed import Packed
from tests.algorithms.sampled import gradient_of, random_sampled

CONFIGS = {
    "grpo": LossConfig(),
    "by sequence": LossConfig(token_level_loss=False),
    "gspo": LossConfig(sequence_level_importance_ratios=True, token_level_loss=False),
    "reinforce": LossConfig(disable_ppo_ratio=True),
    "cispo": LossConfig(use_cispo=True),
    "weighed": LossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.5,
        truncated_importance_sampling_ratio_min=0.5,
    ),
}


def truncated_tokens(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that the current policy and the one before the step truncate."""
    places = torch.arange(len(packed.leaf))
    return places % 5 == 1, places % 7 == 2


def truncated(packed: Packed) -> tuple[Outputs, Packed]:
    """Return a batch in which the truncated distributions have more mass for kept tokens than the whole ones."""
    by_current, by_old = truncated_tokens(packed)
    outputs = Outputs(
        logprobs=torch.where(by_current, -torch.inf, packed.logprobs), full_logprobs=packed.logprobs - 0.3 * packed.leaf.cos()
    )
    old = packed.batch.old_logprobs
    batch = packed.batch
    if old is not None:
        batch = replace(batch, old_logprobs=torch.where(by_old, -torch.inf, old), old_full_logprobs=old - 0.25)
    return outputs, replace(packed, batch=batch)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_truncated_tokens_do_not_count(name, old):
    packed = random_sampled(3, old=old)
    outputs, given = truncated(packed)
    out = policy_loss(CONFIGS[name], outputs, given.batch, packed.counts)
    by_current, by_old = truncated_tokens(packed)
    outside = by_current | by_old if old else by_current
    without = replace(packed.batch, loss_mask=packed.batch.loss_mask & ~outside)
    expected = policy_loss(CONFIGS[name], Outputs(logprobs=packed.logprobs), without, packed.counts)
    torch.testing.assert_close(out.loss, expected.loss, rtol=0, atol=1e-14)
    gradient = gradient_of(out.loss, packed)
    torch.testing.assert_close(gradient, gradient_of(expected.loss, packed), rtol=0, atol=1e-14)
    assert gradient.isfinite().all() and gradient.any() and not gradient[outside].any()
    excluded = out.metrics.pop("excluded_fraction")
    assert excluded * packed.counts.tokens == pytest.approx(int((packed.batch.loss_mask & outside).sum()))
    assert 0 < excluded < 0.5
    seen = torch.where(
        by_old if old else by_current, packed.batch.generate_logprobs, packed.batch.old_logprobs if old else packed.leaf
    )
    mismatch = mismatch_metrics(seen.detach(), packed.batch, packed.counts)  # of all that the train ranks can judge
    assert mismatch["token_mult_prob_error"] >= 1 and out.metrics.keys() == expected.metrics.keys()
    assert all(torch.equal(out.metrics[metric], value) for metric, value in (expected.metrics | mismatch).items())


@pytest.mark.parametrize("approximation", [True, False])
def test_kl_in_the_loss_is_of_whole_distributions_at_all_tokens(approximation):
    packed = random_sampled(4, reference=True)
    config = LossConfig(reference_policy_kl_penalty=0.1, use_on_policy_kl_approximation=approximation)
    _, given = truncated(packed)
    out = policy_loss(config, truncated(packed)[0], given.batch, packed.counts)
    only_kl = replace(packed.batch, advantages=torch.zeros_like(packed.batch.advantages))
    expected = policy_loss(config, Outputs(logprobs=truncated(packed)[0].full_logprobs), only_kl, packed.counts)
    assert out.metrics["reference_kl"] == expected.metrics["reference_kl"]
    surrogate = policy_loss(LossConfig(), truncated(packed)[0], replace(given.batch, reference_logprobs=None), packed.counts)
    gradients = [gradient_of(loss, packed) for loss in (out.loss, expected.loss, surrogate.loss)]
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2], rtol=0, atol=1e-14)
    assert gradients[0][truncated_tokens(packed)[0] & packed.batch.loss_mask].all()


def test_kl_in_the_reward_is_of_whole_distributions():
    packed = random_sampled(5, reference=True)
    _, given = truncated(packed)
    config = LossConfig(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)
    full = replace(packed.batch, old_logprobs=packed.batch.old_logprobs - 0.25)
    assert torch.equal(kl_in_reward(given.batch, config), kl_in_reward(full, config))


def test_a_truncated_token_does_not_exclude_its_sequence():
    packed = random_sampled(6, noise=0.01)
    _, given = truncated(packed)
    assert torch.equal(mask_mismatched_sequences(given.batch, 1.1), packed.batch.loss_mask)
    far = replace(given.batch, generate_logprobs=packed.batch.generate_logprobs - 1.0)
    assert not mask_mismatched_sequences(far, 1.1).any()
    estimate = made(GRPOConfig(seq_logprob_error_threshold=1.1), LossConfig(), updates=1).estimate
    assert torch.equal(estimate(given.batch).loss_mask, packed.batch.loss_mask)
