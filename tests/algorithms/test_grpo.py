"""GRPO: advantages and loss by hand, against a second implementation, and however the tokens are cut into microbatches."""

import itertools
import math

import numpy as np
import pytest
import torch

from pipeline.algorithms.advantages import EPSILON, group_advantages
from pipeline.algorithms.base import Needs
from pipeline.algorithms.grpo import GRPO, estimate_kl
from pipeline.config import GRPOConfig, LossConfig
from pipeline.types import Completion, GlobalCounts, PackedBatch, Prompt, Rollout, RolloutGroup, Span

# ---- advantages -------------------------------------------------------------------------------------------------------


def test_mean_baseline_by_hand():
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0], leave_one_out=False, normalize=False)
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out_by_hand():
    advantages = group_advantages([1.0, 0.0, 0.0], leave_one_out=True, normalize=False)
    assert advantages.tolist() == [1.0, -0.5, -0.5]


def test_normalised_by_hand():
    advantages = group_advantages([1.0, 0.0, 0.0, 1.0], leave_one_out=False, normalize=True)
    expected = 0.5 / (math.sqrt(4 * 0.25 / 3) + EPSILON)
    np.testing.assert_allclose(advantages, [expected, -expected, -expected, expected], rtol=1e-12)


def test_leave_one_out_normalised_by_hand():
    """The sample that is right alone sees others that do not vary, so it is not divided; the others see (1, 0, 0)."""
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0], leave_one_out=True, normalize=True)
    expected = -(1 / 3) / (math.sqrt(1 / 3) + EPSILON)
    np.testing.assert_allclose(advantages, [1.0, expected, expected, expected], rtol=1e-12)


@pytest.mark.parametrize(("leave_one_out", "normalize"), list(itertools.product([True, False], repeat=2)))
def test_equal_rewards_give_no_advantage(leave_one_out, normalize):
    assert not group_advantages([0.7] * 5, leave_one_out, normalize).any()


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_a_group_of_one_gives_no_advantage(leave_one_out):
    assert group_advantages([1.0], leave_one_out, normalize=True).tolist() == [0.0]


def test_advantages_without_scale_are_shift_invariant_and_sum_to_zero():
    rewards = np.random.default_rng(0).normal(size=8)
    for leave_one_out in (True, False):
        one = group_advantages(rewards, leave_one_out, normalize=False)
        other = group_advantages(rewards + 3, leave_one_out, normalize=False)
        np.testing.assert_allclose(one, other, atol=1e-12)
        assert abs(one.sum()) < 1e-12


# ---- samples ----------------------------------------------------------------------------------------------------------


def test_credit_masks_the_prompt_and_spreads_the_advantage():
    prompt = Prompt(0, np.array([5, 6], np.int32), "math", {})
    completions = [
        Completion("0/0", np.array([7, 2], np.int32), np.array([-0.1, -0.2], np.float32), (Span(0, 2),), "stop"),
        Completion("0/1", np.array([8], np.int32), np.array([-0.3], np.float32), (Span(0, 1),), "length"),
    ]
    group = RolloutGroup(prompt, tuple(Rollout(c, r) for c, r in zip(completions, (1.0, 0.0), strict=True)))
    config = GRPOConfig(normalize_rewards=False, use_leave_one_out_baseline=True)
    first, second = GRPO(config, LossConfig(), updates_per_step=1).credit([group])
    assert first.tokens.tolist() == [5, 6, 7, 2]
    assert first.loss_mask.tolist() == [False, False, True, True]
    np.testing.assert_allclose(first.logprobs, [0, 0, -0.1, -0.2], rtol=1e-6)
    assert first.advantages.tolist() == [0, 0, 1, 1]
    assert second.advantages.tolist() == [0, 0, -1]


def test_needs_follow_from_the_recipe():
    assert GRPO(GRPOConfig(), LossConfig(), 1).needs == Needs(old=False, reference=False)
    assert GRPO(GRPOConfig(), LossConfig(reference_policy_kl_penalty=0.1), 2).needs == Needs(old=True, reference=True)


# ---- the loss ---------------------------------------------------------------------------------------------------------

LENGTHS = (5, 3, 7, 2)


def batch_of(lengths, seed=0, old=True, reference=True, dtype=torch.float64) -> tuple[torch.Tensor, PackedBatch]:
    """Random log-probs with a graph, and a batch around them."""
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])

    def near(center):
        return (center + 0.4 * torch.randn(total, generator=rng, dtype=dtype)).clamp(max=-1e-3)

    current = near(torch.full((total,), -1.5, dtype=dtype))
    batch = PackedBatch(
        tokens=torch.zeros(total, dtype=torch.int64),
        positions=positions,
        cu_seqlens=starts,
        lengths=tuple(lengths),
        loss_mask=positions > 0,
        generate_logprobs=near(current),
        advantages=torch.randn(total, generator=rng, dtype=dtype),
        old_logprobs=near(current) if old else None,
        reference_logprobs=near(current) if reference else None,
    )
    return current.requires_grad_(), batch


def cut(logprobs, batch, start, stop):
    """The microbatch of the sequences start..stop."""
    a, b = int(batch.cu_seqlens[start]), int(batch.cu_seqlens[stop])

    def part(tensor):
        return None if tensor is None else tensor[a:b]

    fields = ("tokens", "positions", "loss_mask", "generate_logprobs", "advantages", "old_logprobs", "reference_logprobs")
    cu_seqlens = batch.cu_seqlens[start : stop + 1] - a
    parts = {name: part(getattr(batch, name)) for name in fields}
    return logprobs[a:b], PackedBatch(cu_seqlens=cu_seqlens, lengths=batch.lengths[start:stop], **parts)


def counts_of(batch):
    return GlobalCounts(tokens=int(batch.loss_mask.sum()), sequences=len(batch.lengths))


def reference_loss(logprobs, batch, config: LossConfig):
    """The same loss token by token in plain Python, padded nowhere, reduced at the end."""
    per_sequence = []
    start = 0
    for length in batch.lengths:
        terms = []
        for t in range(start, start + length):
            if not batch.loss_mask[t]:
                continue
            now, advantage = logprobs[t], batch.advantages[t]
            old = now.detach() if batch.old_logprobs is None else batch.old_logprobs[t]
            ratio = (now - old).exp()
            low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
            bounded = ratio if low <= ratio <= high else torch.tensor(low if ratio < low else high, dtype=ratio.dtype)
            term = -min(ratio * advantage, bounded * advantage)
            if config.use_importance_sampling_correction:
                weight = math.exp(float(old - batch.generate_logprobs[t]))
                term = term * min(weight, config.truncated_importance_sampling_ratio or math.inf)
            if batch.reference_logprobs is not None:
                x = batch.reference_logprobs[t] - now
                kl = {"k1": -x, "k2": x * x / 2, "k3": x.exp() - 1 - x}[config.reference_policy_kl_type]
                term = term + config.reference_policy_kl_penalty * kl * (now - now.detach()).exp()
            terms.append(term)
        per_sequence.append(terms)
        start += length
    if config.token_level_loss:
        return sum(itertools.chain(*per_sequence)) / sum(map(len, per_sequence))
    return sum(sum(terms) / len(terms) for terms in per_sequence) / len(per_sequence)


CASES = [
    dict(
        token_level_loss=token_level,
        use_importance_sampling_correction=correct,
        truncated_importance_sampling_ratio=bound,
        **kl,
    )
    for token_level in (True, False)
    for correct, bound in ((False, None), (True, None), (True, 1.1))
    for kl in (
        {},
        {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"},
        {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k2"},
        {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k3", "ratio_clip_max": 0.28},
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("old", [True, False])
def test_loss_and_gradient_equal_a_second_implementation(case, old):
    config = LossConfig(**case)
    logprobs, batch = batch_of(LENGTHS, old=old, reference=config.reference_policy_kl_penalty != 0)
    expected = reference_loss(logprobs, batch, config)
    (expected_grad,) = torch.autograd.grad(expected, logprobs)
    out = GRPO(GRPOConfig(), config, 1).loss(logprobs, batch, counts_of(batch))
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    assert abs(out.loss - expected) < 1e-12
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_shares_of_microbatches_add_up(case):
    config = LossConfig(**case)
    logprobs, batch = batch_of(LENGTHS, reference=config.reference_policy_kl_penalty != 0)
    algorithm, counts = GRPO(GRPOConfig(), config, 1), counts_of(batch)
    whole = algorithm.loss(logprobs, batch, counts)
    parts = [algorithm.loss(*cut(logprobs, batch, i, j), counts) for i, j in ((0, 1), (1, 3), (3, 4))]
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, rtol=0, atol=1e-12)
    for name, value in whole.metrics.items():
        values = torch.stack([part.metrics[name] for part in parts])
        combined = values.max() if name.endswith("_max") else values.min() if name.endswith("_min") else values.sum()
        torch.testing.assert_close(combined, value, rtol=0, atol=1e-12, msg=name)


def test_on_policy_gradient_is_reinforce():
    """With pi_old = pi the gradient is that of -A log pi, whatever the clip; ratio is 1 and ppo_kl 0."""
    logprobs, batch = batch_of(LENGTHS, old=False, reference=False)
    counts = counts_of(batch)
    out = GRPO(GRPOConfig(), LossConfig(), 1).loss(logprobs, batch, counts)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    expected = torch.where(batch.loss_mask, -batch.advantages / counts.tokens, 0.0)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-15)
    assert out.metrics["ppo_kl"] == 0
    assert out.metrics["clip_fraction"] == 0
    assert out.metrics["ratio_max"] == out.metrics["ratio_min"] == 1


def test_equal_logprobs_make_every_correction_nothing():
    logprobs, batch = batch_of(LENGTHS, old=False, reference=False)
    same = PackedBatch(**{f: getattr(batch, f) for f in PackedBatch.__slots__} | {"generate_logprobs": logprobs.detach()})
    corrected = LossConfig(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=2.0)
    one = GRPO(GRPOConfig(), LossConfig(), 1).loss(logprobs, same, counts_of(same))
    other = GRPO(GRPOConfig(), corrected, 1).loss(logprobs, same, counts_of(same))
    assert one.loss == other.loss
    assert one.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-12)
    assert one.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-12)
    assert one.metrics["gen_kl_error"] == pytest.approx(0.0, abs=1e-12)


def test_clipped_tokens_have_no_gradient():
    logprobs = torch.log(torch.tensor([0.9, 0.9, 0.1, 0.1], dtype=torch.float64)).requires_grad_()
    _, batch = batch_of((4,), old=True, reference=False)
    fields = {f: getattr(batch, f) for f in PackedBatch.__slots__}
    fields |= {
        "old_logprobs": torch.log(torch.full((4,), 0.5, dtype=torch.float64)),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
        "loss_mask": torch.ones(4, dtype=torch.bool),
    }
    batch = PackedBatch(**fields)
    out = GRPO(GRPOConfig(), LossConfig(), 1).loss(logprobs, batch, counts_of(batch))
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    # ratios 1.8, 1.8, 0.2, 0.2: raised and praised, or lowered and blamed, is clipped
    torch.testing.assert_close(grad, torch.tensor([0.0, 1.8 / 4, -0.2 / 4, 0.0], dtype=torch.float64))
    assert out.metrics["clip_fraction"] == 0.5


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_kl_estimates_by_hand(kind, expected):
    value = estimate_kl(torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64), kind)
    assert value.item() == pytest.approx(expected, abs=1e-15)


def test_kl_clamps():
    far = estimate_kl(torch.tensor([-50.0]), torch.tensor([-1.0]), "k1", input_clamp=20.0, output_clamp=10.0)
    assert far.item() == -10.0
    assert estimate_kl(torch.tensor([-50.0]), torch.tensor([-1.0]), "k1", input_clamp=20.0).item() == -20.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_is_that_of_the_exact_kl(kind):
    """Over tokens drawn from the policy, k1's and k3's gradient with the score factor is the exact KL's; k2's is near."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=rng, dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(logits.detach() + 0.05 * torch.randn(6, generator=rng, dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    estimate = estimate_kl(logprobs, reference, kind) * torch.exp(logprobs - logprobs.detach())
    (grad,) = torch.autograd.grad((logprobs.detach().exp() * estimate).sum(), logits)
    torch.testing.assert_close(grad, exact, rtol=0, atol=1e-12 if kind != "k2" else 2e-3)


def test_entries_outside_the_mask_do_not_matter():
    logprobs, batch = batch_of(LENGTHS, old=False, reference=False)
    fields = {f: getattr(batch, f) for f in PackedBatch.__slots__}
    poisoned = torch.where(batch.loss_mask, batch.generate_logprobs, -torch.inf)
    out = GRPO(GRPOConfig(), LossConfig(), 1).loss(
        logprobs, PackedBatch(**fields | {"generate_logprobs": poisoned}), counts_of(batch)
    )
    clean = GRPO(GRPOConfig(), LossConfig(), 1).loss(logprobs, batch, counts_of(batch))
    assert out.loss == clean.loss
    assert all(out.metrics[name] == value for name, value in clean.metrics.items())
