"""KL in the loss and in the reward: the three estimates, their clamps and their gradients."""

import math
from dataclasses import replace

import pytest
import torch

from pipeline.algorithms.loss import estimate_kl, kl_in_loss, kl_in_reward, policy_loss
from pipeline.config import LossConfig
from tests.algorithms import reference
from tests.algorithms.sampled import (
    gradient_of,
    outputs_of,
    random_sampled,
)


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_estimates_by_hand(kind, expected):
    value = estimate_kl(torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64), kind)
    assert value.item() == pytest.approx(expected, abs=1e-15)


def test_clamps_by_hand():
    far, near = torch.tensor([-50.0]), torch.tensor([-1.0])
    assert estimate_kl(far, near, "k1", input_clamp=20.0, output_clamp=10.0).item() == -10.0
    assert estimate_kl(far, near, "k1", input_clamp=20.0).item() == -20.0
    assert estimate_kl(far, near, "k1", output_clamp=10.0, weight=torch.tensor([0.1])).item() == pytest.approx(-4.9)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradient_is_that_of_the_exact_kl(kind):
    """With the score factor, k1's and k3's gradients over the policy's samples equal the exact KL's; k2's is near."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=rng, dtype=torch.float64).requires_grad_()
    frozen = torch.log_softmax(logits.detach() + 0.05 * torch.randn(6, generator=rng, dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - frozen)).sum(), logits, retain_graph=True)
    estimate = estimate_kl(logprobs, frozen, kind, weight=torch.exp(logprobs - logprobs.detach()))
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * estimate).sum(), logits)
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12 if kind != "k2" else 2e-3)


def test_tokens_of_another_policy_give_the_same_gradient_with_the_approximation():
    rng = torch.Generator().manual_seed(4)
    logits = torch.randn(6, generator=rng, dtype=torch.float64).requires_grad_()
    generate, frozen = torch.randn(2, 6, generator=rng, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - frozen)).sum(), logits, retain_graph=True)
    estimate = estimate_kl(logprobs, frozen, "k3", weight=torch.exp(logprobs - generate))
    (gradient,) = torch.autograd.grad((generate.exp() * estimate).sum(), logits)
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12)


def test_a_policy_that_is_the_reference_has_no_kl():
    packed = random_sampled(5, reference=True)
    batch = replace(packed.batch, reference_logprobs=packed.leaf.detach().clone())
    config = LossConfig(reference_policy_kl_penalty=0.3)
    with_it = policy_loss(config, outputs_of(packed), batch, packed.counts)
    without = policy_loss(LossConfig(), outputs_of(packed), packed.batch, packed.counts)
    assert with_it.metrics["reference_kl"] == 0 and with_it.loss == without.loss
    assert torch.equal(gradient_of(with_it.loss, packed), gradient_of(without.loss, packed))


def test_kl_in_the_reward_is_of_the_old_policy_and_not_in_the_loss():
    packed = random_sampled(6, reference=True)
    config = LossConfig(reference_policy_kl_penalty=0.3, reference_policy_kl_type="k1", use_kl_in_reward=True)
    found = kl_in_reward(packed.batch, config)
    mask = packed.batch.loss_mask
    torch.testing.assert_close(found[mask], (packed.batch.old_logprobs - packed.batch.reference_logprobs)[mask])
    assert not found[~mask].any()
    out = policy_loss(config, outputs_of(packed), packed.batch, packed.counts)
    assert out.loss == policy_loss(LossConfig(), outputs_of(packed), packed.batch, packed.counts).loss
    assert out.metrics["reference_kl"].item() == pytest.approx(
        kl_in_loss(packed.leaf, packed.batch, config)[mask].mean().item()
    )


def test_an_unknown_estimate_is_refused():
    with pytest.raises(ValueError, match="'k4'"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_the_reference_has_the_same_values():
    """`reference.kl` is compared with in the tables; these numbers are by hand: x = log pi_ref - log pi = -0.25."""
    now, frozen = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.25, dtype=torch.float64)
    for kind, expected in (("k1", 0.25), ("k2", 0.03125), ("k3", math.exp(-0.25) - 0.75)):
        config = LossConfig(reference_policy_kl_type=kind)
        assert reference.kl(config, now, frozen, torch.tensor(1.0)).item() == pytest.approx(expected, abs=1e-15)


def test_the_gradient_of_the_estimate_alone():
    """TRL's per_token_kl = exp(ref - logp) - (ref - logp) - 1: the same value as with the KL's gradient, another gradient."""
    packed = random_sampled(9, reference=True)
    mask, count = packed.batch.loss_mask, int(packed.batch.loss_mask.sum())
    out, plain = (
        policy_loss(
            LossConfig(reference_policy_kl_penalty=0.3, reference_policy_kl_gradient=gradient),
            outputs_of(packed),
            packed.batch,
            packed.counts,
        )
        for gradient in ("kl", "estimate")
    )
    without = gradient_of(policy_loss(LossConfig(), outputs_of(packed), packed.batch, packed.counts).loss, packed)
    assert out.loss.item() == plain.loss.item() and out.metrics["reference_kl"] == plain.metrics["reference_kl"]
    x = torch.where(mask, packed.batch.reference_logprobs - packed.leaf.detach(), 0.0)
    for loss, slope in ((plain.loss, 1 - x.exp()), (out.loss, 1 - x.exp() + x.exp() - 1 - x)):
        torch.testing.assert_close(gradient_of(loss, packed) - without, 0.3 * slope * mask / count, rtol=1e-9, atol=1e-12)
