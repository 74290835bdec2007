"""The policy's loss of GRPO, PPO and their descendants: by hand, against a second implementation, and for every split.

Ours was once compared with TRL 1.16's own code (`GRPOTrainer._compute_loss`, and its importance-sampling ratios) on the same
log-probs: losses and gradients of grpo, dapo, bnpo, cispo, sequence-level ratios, delta, the entropy bonus, the corrected KL
and the four vllm_importance_sampling_modes were equal to 3e-16. NeMo-RL's `ClippedPGLossFn` gave the same for all recipes' keys
that these tests go through, to the 1e-8 that it adds to lengths; so did its GAE and its value loss.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipeline.algorithms.loss import policy_loss, sequence_log_ratios
from pipeline.config import LossConfig
from pipeline.types import PackedBatch
from tests.algorithms.made import grpo, weighed
from tests.algorithms.packed import Packed
from tests.algorithms.sampled import (
    assert_gradcheck,
    assert_split_invariant,
    gradient_of,
    largest_difference,
    outputs_of,
    random_sampled,
)

SEQUENCES = {"sequence_level_importance_ratios": True, "token_level_loss": False}
HIGHER = LossConfig(ratio_clip_min=0.2, ratio_clip_max=0.28)


CONFIGS = {
    "GRPO, the paper's": LossConfig(token_level_loss=False, reference_policy_kl_penalty=0.04),
    "GRPO, token-level": LossConfig(),
    "GRPO, dual clip": LossConfig(ratio_clip_c=1.5),
    "GRPO, forced ratio": LossConfig(force_on_policy_ratio=True),
    "GRPO, ratio to the engines": LossConfig(use_generation_logprobs=True),
    "GSPO, ratio to the engines": LossConfig(use_generation_logprobs=True, **SEQUENCES),
    "CISPO, ratio to the engines": LossConfig(use_generation_logprobs=True, use_cispo=True),
    "GRPO, entropy bonus": LossConfig(entropy_coeff=0.1),
    "GRPO, entropy bonus, by sequence": LossConfig(entropy_coeff=0.1, token_level_loss=False),
    "PPO, dual clip, tis, KL": weighed("tis", 1.2, ratio_clip_c=3.0, reference_policy_kl_penalty=0.1),
    "DAPO": HIGHER,
    "GSPO, the paper's": LossConfig(**SEQUENCES, ratio_clip_min=3e-4, ratio_clip_max=4e-4),
    "GSPO, wide bounds": LossConfig(**SEQUENCES),
    "GSPO, dual clip": LossConfig(**SEQUENCES, ratio_clip_c=1.1),
    "GSPO, importance sampling": weighed(**SEQUENCES),
    "GSPO, tis": weighed("tis", 1.5, **SEQUENCES),
    "GSPO, icepop": weighed("icepop", 1.5, 0.5, **SEQUENCES),
    "CISPO, the paper's": LossConfig(use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.5),
    "CISPO, both bounds, tis": weighed("tis", 2.0, use_cispo=True),
    "SAPO": LossConfig(use_sapo=True, token_level_loss=False),
    "SAPO, other temperatures, tis": weighed(
        "tis", 2.0, use_sapo=True, token_level_loss=False, sapo_temperature_positive=3.0, sapo_temperature_negative=0.5
    ),
    "DPPO": LossConfig(use_dppo=True, ratio_clip_min=0.02, ratio_clip_max=0.01),
    "DPPO, drift, ratio to the engines": LossConfig(
        use_dppo=True, drift_penalty=0.1, use_generation_logprobs=True, ratio_clip_min=0.01, ratio_clip_max=0.02
    ),
    "GRPO, drift, by sequence": LossConfig(drift_penalty=0.1, token_level_loss=False),
    "Importance sampling of sequences, icepop": weighed("icepop", 1.5, 0.5, sequence_level_importance_weights=True),
    "KL k3, the estimate's gradient": LossConfig(reference_policy_kl_penalty=0.3, reference_policy_kl_gradient="estimate"),
    "RLOO, by token": LossConfig(disable_ppo_ratio=True),
    "RLOO, by sequence, KL": LossConfig(disable_ppo_ratio=True, token_level_loss=False, reference_policy_kl_penalty=0.1),
    "RLOO, weights of sequences": weighed(disable_ppo_ratio=True, **SEQUENCES),
    "Importance sampling, untruncated": weighed(),
    "Importance sampling, tis": weighed("tis", 1.1),
    "Importance sampling, tis, both bounds": weighed("tis", 1.1, 0.9, token_level_loss=False),
    "Importance sampling, icepop": weighed("icepop", 1.2, 0.8),
    "Importance sampling, seq-mask-tis": weighed("seq-mask-tis", 1.05, 0.95),
    "Importance sampling, seq-mask-tis, by sequence": weighed("seq-mask-tis", 1.05, 0.95, token_level_loss=False),
    **{
        f"KL {kind}, {clamps}, {factor}": LossConfig(
            reference_policy_kl_penalty=0.3,
            reference_policy_kl_type=kind,
            kl_input_clamp_value=0.5 if clamps == "clamped" else None,
            kl_output_clamp_value=0.1 if clamps == "clamped" else None,
            use_on_policy_kl_approximation=factor == "pi / pi_generate",
            token_level_loss=clamps == "unclamped",
        )
        for kind, clamps, factor in itertools.product(
            ("k1", "k2", "k3"), ("unclamped", "clamped"), ("on policy", "pi / pi_generate")
        )
    },
}
STOPPED = (
    "GSPO",
    "GRPO, the paper's",
    "GRPO, forced ratio",
    "PPO",
    "CISPO",
    "RLOO, by sequence, KL",
)  # gradients in their losses


def is_differentiable(name: str) -> bool:
    """Return whether nothing in the loss has a stopped gradient; of KL, the factor pi / pi_generate has none."""
    return "unclamped, pi" in name if name.startswith("KL") else not name.startswith(STOPPED)


def noise(name: str) -> float:
    """Return the distance of policies: ratios of whole sequences are products."""
    return 0.1 if name.startswith(("GSPO", "RLOO")) else 0.4


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    return {name: largest_difference(config, noise=noise(name)) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_against_the_reference(name):
    _, loss, gradient = largest_difference(CONFIGS[name], noise=noise(name))
    assert loss < 1e-12 and gradient < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_the_split_and_order_of_sequences_do_not_matter(name):
    config = CONFIGS[name]
    packed = random_sampled(1, reference=config.reference_policy_kl_penalty != 0, noise=noise(name))
    assert_split_invariant(partial(policy_loss, config), packed, entropy=config.entropy_coeff != 0)


@pytest.mark.parametrize("name", list(filter(is_differentiable, CONFIGS)))
def test_gradcheck(name):
    """Compare the gradient with finite differences of the loss."""
    config = CONFIGS[name]
    packed = random_sampled(2, reference=config.reference_policy_kl_penalty != 0)
    assert_gradcheck(partial(policy_loss, config), packed, entropy=config.entropy_coeff != 0)


# ---- the clipped surrogate -------------------------------------------------------------------------------------------


def by_hand(config: LossConfig, ratios: list[float], advantages: list[float]) -> tuple[float, list[float], dict[str, float]]:
    """Return loss, gradient and metrics of one sequence of these tokens after one that does not count."""
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
    """A token is clipped if its ratio moved past the bound in the direction of its advantage."""
    loss, gradient, metrics = by_hand(LossConfig(), [1.8, 1.8, 0.2, 0.2], [1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx((-1.2 + 1.8 - 0.2 + 0.8) / 4, abs=1e-15)
    assert gradient == pytest.approx([0.0, 1.8 / 4, -0.2 / 4, 0.0], abs=1e-15)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_max"] == pytest.approx(1.8) and metrics["ratio_min"] == pytest.approx(0.2)


def test_clip_higher_by_hand():
    loss, gradient, metrics = by_hand(HIGHER, [1.25, 1.3, 0.75], [1.0, 1.0, -1.0])
    assert loss == pytest.approx((-1.25 - 1.28 + 0.8) / 3)
    assert gradient == pytest.approx([-1.25 / 3, 0.0, 0.0])
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)


def test_dual_clip_by_hand():
    """The dual clip bounds the loss of a token with A < 0, here by 3; tokens with A > 0 are bounded already."""
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


def test_a_tokens_weight_does_not_depend_on_its_answers_length():
    packed = random_sampled(0, old=False)
    out = policy_loss(LossConfig(token_level_loss=True), outputs_of(packed), packed.batch, packed.counts)
    weights = gradient_of(out.loss, packed) / -packed.batch.advantages
    assert torch.allclose(weights[packed.batch.loss_mask], torch.tensor(1 / packed.counts.tokens, dtype=torch.float64))


@pytest.mark.parametrize("forced", [False, True])
def test_on_policy_gradient_is_reinforce(forced):
    """With pi_old = pi the gradient is that of -A log pi, whatever the clip; the ratio is 1 and ppo_kl 0.

    Log-probs of an old policy change nothing where the ratio is forced.
    """
    packed = random_sampled(3, old=forced)
    config = LossConfig(force_on_policy_ratio=forced, ratio_clip_min=0.0, ratio_clip_max=0.0)
    out = policy_loss(config, outputs_of(packed), packed.batch, packed.counts)
    reinforce = policy_loss(LossConfig(disable_ppo_ratio=True), outputs_of(packed), packed.batch, packed.counts)
    expected = -packed.batch.advantages / packed.counts.tokens
    torch.testing.assert_close(gradient_of(out.loss, packed), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient_of(reinforce.loss, packed), expected, rtol=0, atol=1e-15)
    assert out.metrics["ppo_kl"] == out.metrics["clip_fraction"] == 0
    assert out.metrics["ratio_max"] == out.metrics["ratio_min"] == 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_engines_log_probs_are_the_denominator(advantage):
    """By hand: the clipped surrogate of r = pi / pi_generate, whatever the train ranks' old policy is, and no other weight."""
    packed = random_sampled(3, old=True)
    batch = replace(packed.batch, advantages=torch.where(packed.batch.loss_mask, advantage, 0.0))
    out = policy_loss(LossConfig(use_generation_logprobs=True), outputs_of(packed), batch, packed.counts)
    mask = batch.loss_mask
    ratio = torch.exp(packed.leaf.detach() - batch.generate_logprobs)[mask]
    clipped = ratio.clamp(max=1.2) if advantage > 0 else ratio.clamp(min=0.8)
    torch.testing.assert_close(out.loss.detach(), -advantage * clipped.sum() / packed.counts.tokens)
    kept = ratio <= 1.2 if advantage > 0 else ratio >= 0.8
    gradient = -advantage * torch.where(kept, ratio, 0.0) / packed.counts.tokens
    torch.testing.assert_close(gradient_of(out.loss, packed)[mask], gradient)
    metrics = out.metrics
    assert metrics["sampling_importance_ratio"] == pytest.approx(1)
    assert 0 < kept.sum() < mask.sum() and metrics["ratio_max"] == ratio.max()
    error = torch.maximum(ratio, 1 / ratio).sum() / packed.counts.tokens  # of the policy that is trained, not of pi_old
    assert metrics["token_mult_prob_error"] == pytest.approx(error.item())


def test_first_of_several_updates_is_on_policy():
    """An old policy equal to the policy gives bitwise the same result."""
    packed = random_sampled(4, old=False)
    batch = replace(packed.batch, old_logprobs=packed.leaf.detach().clone())
    one = policy_loss(LossConfig(), outputs_of(packed), packed.batch, packed.counts)
    other = policy_loss(LossConfig(), outputs_of(packed), batch, packed.counts)
    assert one.loss == other.loss and other.metrics["ppo_kl"] == 0 and other.metrics["ratio_max"] == 1
    assert torch.equal(gradient_of(one.loss, packed), gradient_of(other.loss, packed))


# ---- GSPO, CISPO, REINFORCE ------------------------------------------------------------------------------------------


def test_the_ratio_is_the_geometric_mean():
    packed = random_sampled(0, lengths=(4, 3))
    mask = torch.tensor([False, True, False, True, False, False, True])
    ratios = torch.tensor([9.0, 2.0, 9.0, 8.0, 9.0, 9.0, 0.5], dtype=torch.float64)
    found = sequence_log_ratios(ratios.log(), replace(packed.batch, loss_mask=mask)).exp()
    assert found.tolist() == pytest.approx([4.0, 4.0, 4.0, 4.0, 0.5, 0.5, 0.5])


def test_a_sequence_is_clipped_as_a_whole():
    """Ratios 2 and 1/2 of one sequence give a ratio of 1; ratios all equal to 1.5 are above 1.2."""
    packed = random_sampled(0, lengths=(3, 3))
    ratios = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False, True, True] * 2),
        old_logprobs=packed.leaf.detach() - ratios.log(),
        advantages=torch.tensor([0.0, 1.0, 1.0] * 2, dtype=torch.float64),
    )
    packed = replace(packed, batch=batch)
    out = policy_loss(LossConfig(**SEQUENCES), outputs_of(packed), batch, packed.counts)
    assert out.loss.item() == pytest.approx(-(1 + 1.2) / 2)
    assert gradient_of(out.loss, packed).tolist() == pytest.approx([0, -0.25, -0.25, 0, 0, 0])
    assert out.metrics["clip_fraction"] == 0.5


def test_equal_policies_give_reinforce_by_sequence():
    packed = random_sampled(3, old=False)
    out = policy_loss(LossConfig(**SEQUENCES), outputs_of(packed), packed.batch, packed.counts)
    expected = policy_loss(LossConfig(token_level_loss=False), outputs_of(packed), packed.batch, packed.counts)
    assert out.metrics["ratio_max"] == out.metrics["ratio_min"] == 1
    assert out.loss.item() == pytest.approx(expected.loss.item(), abs=1e-15)
    # With one advantage for all tokens of a sequence, the gradients are the same too.
    constant = torch.cat([torch.full((n,), math.sin(n), dtype=torch.float64) for n in packed.batch.lengths])
    batch = replace(packed.batch, advantages=constant)
    one = gradient_of(policy_loss(LossConfig(**SEQUENCES), outputs_of(packed), batch, packed.counts).loss, packed)
    other = gradient_of(policy_loss(LossConfig(token_level_loss=False), outputs_of(packed), batch, packed.counts).loss, packed)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-15)


def test_cispos_loss_and_gradient_by_hand():
    """With ratios 4, 4, 1/4 and 1, a bounded token keeps the bound's gradient, whatever the sign of its advantage."""
    packed = random_sampled(0, lengths=(5,))
    ratios = torch.tensor([1.0, 4.0, 4.0, 0.25, 1.0], dtype=torch.float64)
    with torch.no_grad():
        packed.leaf.fill_(math.log(0.5))
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False, True, True, True, True]),
        old_logprobs=packed.leaf.detach() - ratios.log(),
        advantages=torch.tensor([0.0, 1.0, -1.0, 1.0, -2.0], dtype=torch.float64),
    )
    packed = replace(packed, batch=batch)
    config = LossConfig(use_cispo=True, ratio_clip_min=0.2, ratio_clip_max=1.0)
    out = policy_loss(config, outputs_of(packed), batch, packed.counts)
    weights = [2.0 * 1, 2.0 * -1, 0.8 * 1, 1.0 * -2]
    assert out.loss.item() == pytest.approx(-sum(weights) * math.log(0.5) / 4)
    assert gradient_of(out.loss, packed).tolist() == pytest.approx([0.0] + [-weight / 4 for weight in weights])
    assert out.metrics["clip_fraction"] == 0.75


def test_sapo_of_equal_policies_has_the_gradient_of_reinforce():
    packed = random_sampled(2, old=False)
    by_sequence = {"token_level_loss": False}
    one = policy_loss(LossConfig(use_sapo=True, **by_sequence), outputs_of(packed), packed.batch, packed.counts)
    other = policy_loss(LossConfig(disable_ppo_ratio=True, **by_sequence), outputs_of(packed), packed.batch, packed.counts)
    torch.testing.assert_close(gradient_of(one.loss, packed), gradient_of(other.loss, packed), rtol=1e-12, atol=0)
    assert one.metrics["clip_fraction"] == 0


def test_cispo_of_equal_policies_equals_reinforce():
    packed = random_sampled(2, old=False)
    one = policy_loss(CONFIGS["CISPO, the paper's"], outputs_of(packed), packed.batch, packed.counts)
    other = policy_loss(LossConfig(disable_ppo_ratio=True), outputs_of(packed), packed.batch, packed.counts)
    assert one.loss == other.loss
    assert torch.equal(gradient_of(one.loss, packed), gradient_of(other.loss, packed))


def test_reinforces_loss_and_gradient_by_hand():
    """An old policy changes nothing: there is no ratio."""
    packed = random_sampled(3)
    out = policy_loss(CONFIGS["RLOO, by token"], outputs_of(packed), packed.batch, packed.counts)
    mask, n = packed.batch.loss_mask, packed.counts.tokens
    assert out.loss.item() == pytest.approx(-(packed.batch.advantages * packed.leaf.detach())[mask].sum().item() / n)
    torch.testing.assert_close(gradient_of(out.loss, packed), -packed.batch.advantages / n, rtol=0, atol=1e-15)
    assert out.metrics["clip_fraction"] == 0


# ---- entropy, masks --------------------------------------------------------------------------------------------------


def test_entropy_is_subtracted_from_the_loss():
    packed = random_sampled(5)
    without = policy_loss(LossConfig(), outputs_of(packed), packed.batch, packed.counts)
    logged = policy_loss(LossConfig(log_entropy=True), outputs_of(packed, entropy=True), packed.batch, packed.counts)
    bonus = policy_loss(LossConfig(entropy_coeff=0.5), outputs_of(packed, entropy=True), packed.batch, packed.counts)
    mean = packed.leaf.detach().square()[packed.batch.loss_mask].mean()
    assert "entropy" not in without.metrics and logged.loss == without.loss
    assert logged.metrics["entropy"].item() == pytest.approx(mean.item())
    assert bonus.loss.item() == pytest.approx((without.loss - 0.5 * mean).item())


def test_approximate_entropy_is_the_entropy_over_tokens_drawn_from_the_generate_ranks():
    """Each token of a vocabulary appears once, weighted by its sampling probability."""
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
    """`random_sampled` puts infinities there, in the log-probs of the generate, old and reference policies."""
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


def test_a_batch_without_counted_tokens_has_no_share():
    packed = random_sampled(8)
    batch: PackedBatch = replace(packed.batch, loss_mask=torch.zeros_like(packed.batch.loss_mask))
    out = policy_loss(LossConfig(token_level_loss=False), outputs_of(packed), batch, packed.counts)
    assert out.loss == 0 and not gradient_of(out.loss, packed).any()


# ---- ratios of sequences, with an advantage for each token ------------------------------------------------------------------


def sequences_of(packed: Packed) -> list[torch.Tensor]:
    """Return the places of each sequence's counted tokens."""
    places = torch.arange(len(packed.batch.loss_mask)).split(packed.batch.lengths)
    return [place[packed.batch.loss_mask[place]] for place in places]


def test_gspo_token_by_its_closed_form():
    """Gradient of token t (GSPO, eq. 17): -s_i A_t / |y_i| / sequences, where no bound is active."""
    config = LossConfig(ratio_clip_min=0.9, ratio_clip_max=9.0, **SEQUENCES)
    packed = random_sampled(7, noise=0.1)
    expected, value = torch.zeros_like(packed.logprobs), 0.0
    sequences = sequences_of(packed)
    for places in sequences:
        ratio = (packed.leaf - packed.batch.old_logprobs)[places].mean().exp().detach()
        share = ratio * packed.batch.advantages[places] / len(places) / len(sequences)
        expected[places] = -share
        value -= share.sum().item()
    out = policy_loss(config, outputs_of(packed), packed.batch, packed.counts)
    assert out.loss.item() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(gradient_of(out.loss, packed), expected, rtol=1e-9, atol=1e-12)
    assert len({round(each, 9) for each in (expected[sequences[0]] / expected[sequences[0]][0]).tolist()}) > 1


def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage():
    """Against the gradient of eq. 5, through the mean of the sequence's log ratios, with active bounds."""
    config = LossConfig(ratio_clip_min=0.05, ratio_clip_max=0.05, **SEQUENCES)
    packed = random_sampled(8, noise=0.1)
    advantages = packed.batch.advantages.clone()
    for number, places in enumerate(torch.arange(len(advantages)).split(packed.batch.lengths)):
        advantages[places] = float(number % 3 - 1.3)
    packed = replace(packed, batch=replace(packed.batch, advantages=torch.where(packed.batch.loss_mask, advantages, 0.0)))
    out = policy_loss(config, outputs_of(packed), packed.batch, packed.counts)
    loss, sequences = 0.0, sequences_of(packed)
    for places in sequences:
        ratio = (packed.leaf - packed.batch.old_logprobs)[places].mean().exp()
        advantage = packed.batch.advantages[places[0]]
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage) / len(sequences)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-9)
    torch.testing.assert_close(gradient_of(out.loss, packed), gradient_of(loss, packed), rtol=1e-9, atol=1e-12)
