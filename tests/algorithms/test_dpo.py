"""DPO: by hand, against a padded float64 reference written from the papers, and for every split of pairs into microbatches.

Ours was once compared with TRL 1.16's own code (`DPOTrainer._compute_loss`) on the same log-probs: losses of sigmoid, ipo and
sigmoid_norm and gradients of the first two were equal to 2e-15. Its sigmoid takes no label smoothing any more.
"""

import math

import pytest
import torch

from pipeline.algorithms.algorithm import Needs
from pipeline.algorithms.pairs import split
from pipeline.config import DPOConfig
from pipeline.types import Outputs
from tests.algorithms.made import made
from tests.algorithms.packed import CUTS_OF_PAIRS, Packed, assert_split_invariant, differences, random_packed

CONFIGS = {
    "sigmoid": DPOConfig(sft_average_log_probs=False),
    "sigmoid, beta 2": DPOConfig(reference_policy_kl_penalty=2.0, sft_average_log_probs=False),
    "cDPO": DPOConfig(label_smoothing=0.1, sft_average_log_probs=False),
    "ipo": DPOConfig(preference_loss="ipo", reference_policy_kl_penalty=0.2, sft_average_log_probs=False),
    "per token": DPOConfig(preference_average_log_probs=True, sft_average_log_probs=True, sft_loss_weight=0.3),
    "SFT term": DPOConfig(sft_loss_weight=0.5, preference_loss_weight=0.7, sft_average_log_probs=False),
    "SimPO": DPOConfig(
        reference_policy_kl_penalty=2.0,
        target_margin=0.5,
        reference_free=True,
        preference_average_log_probs=True,
        sft_average_log_probs=False,
    ),
    "ORPO": DPOConfig(preference_loss="orpo", preference_loss_weight=0.1, sft_loss_weight=1.0, sft_average_log_probs=True),
    "reference-free": DPOConfig(reference_free=True, label_smoothing=0.2, sft_average_log_probs=False),
}
LENGTHS = (7, 4, 3, 9, 5, 5, 2, 8)  # chosen, rejected, chosen, rejected ...


def reference_loss(config: DPOConfig, logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the loss from the papers, on padded rows `[2P, L]`, chosen ones first."""
    pairs = len(logprobs) // 2
    policy_sums, reference_sums = (torch.where(mask, values, 0.0).sum(1) for values in (logprobs, reference))
    lengths = mask.sum(1)
    losses = []
    for i in range(pairs):
        h = []
        for row in (i, i + pairs):
            free = config.reference_free or config.preference_loss == "orpo"
            ratio = policy_sums[row] - (0 if free else reference_sums[row])
            per_token = config.preference_average_log_probs or config.preference_loss in ("ipo", "orpo")
            h.append(ratio / lengths[row] if per_token else ratio)
        beta, epsilon = config.reference_policy_kl_penalty, config.label_smoothing
        if config.preference_loss == "ipo":
            preference = (h[0] - h[1] - 0.5 / beta) ** 2
        elif config.preference_loss == "orpo":
            odds = [torch.exp(x) / (1 - torch.exp(x)) for x in h]
            preference = torch.log(1 + odds[1] / odds[0])
        else:
            right = 1 / (1 + torch.exp(config.target_margin - beta * (h[0] - h[1])))
            preference = -(1 - epsilon) * torch.log(right) - epsilon * torch.log(1 - right)
        sft = -policy_sums[i] / (lengths[i] if config.sft_average_log_probs else 1)
        losses.append(config.preference_loss_weight * preference + config.sft_loss_weight * sft)
    return sum(losses) / pairs


def reference_of_packed(config: DPOConfig, packed: Packed) -> torch.Tensor:
    rows = {name: torch.nn.utils.rnn.pad_sequence(packed.sequences(name), batch_first=True) for name in packed.FIELDS}
    first = [*range(0, len(packed.batch.lengths), 2), *range(1, len(packed.batch.lengths), 2)]
    return reference_loss(config, *(rows[name][first] for name in ("logprobs", "reference_logprobs", "loss_mask")))


def largest_differences() -> dict[str, tuple[int, float, float]]:
    def case(config: DPOConfig, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = random_packed(LENGTHS, seed)
        loss = made(config).loss(Outputs(logprobs=packed.leaf), packed.batch, packed.counts).loss
        return loss, reference_of_packed(config, packed), packed.leaf

    return {f"DPO, {name}": differences(case(config, seed) for seed in range(10)) for name, config in CONFIGS.items()}


def test_against_the_reference():
    differences = largest_differences()
    assert len(differences) == len(CONFIGS) == 9
    for name, (cases, loss, gradient) in differences.items():
        assert cases == 10 and loss < 1e-12 and gradient < 1e-12, name


# ---- by hand ----------------------------------------------------------------------------------------------------------


def metrics_of(config: DPOConfig, packed: Packed) -> tuple[float, dict[str, float]]:
    out = made(config).loss(Outputs(logprobs=packed.leaf), packed.batch, packed.counts)
    return out.loss.item(), {name: value.item() for name, value in out.metrics.items()}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DPOConfig(), math.log(2)),
        (DPOConfig(label_smoothing=0.3), math.log(2)),
        (DPOConfig(preference_average_log_probs=True), math.log(2)),
        (DPOConfig(preference_loss="ipo", reference_policy_kl_penalty=0.25), 4.0),  # (1 / (2 * 0.25))^2
    ],
)
def test_the_first_step_with_the_policy_equal_to_the_reference(config: DPOConfig, expected: float):
    """DPO's loss is 0.6931... ."""
    packed = random_packed(LENGTHS, reference_is_policy=True)
    loss, metrics = metrics_of(config, packed)
    assert loss == pytest.approx(expected, abs=1e-12)
    assert metrics["rewards_margin"] == metrics["rewards_chosen_mean"] == metrics["accuracy"] == 0


def by_hand(chosen: list[float], rejected: list[float], reference: float) -> Packed:
    """Return one pair of answers, each after a prompt of one token, with the same reference log-prob everywhere."""
    packed = random_packed((len(chosen) + 1, len(rejected) + 1))
    with torch.no_grad():
        packed.leaf.copy_(torch.tensor([0.0, *chosen, 0.0, *rejected], dtype=torch.float64))
        packed.batch.reference_logprobs.fill_(reference)
        packed.batch.loss_mask.copy_(packed.batch.positions > 0)
    return packed


def test_one_pair_by_hand():
    """h_c = -0.5 - 0.5 + 2 = 1, h_r = -1 - 1 - 1 + 3 = 0, beta 2: - log sigma(2)."""
    packed = by_hand([-0.5, -0.5], [-1.0, -1.0, -1.0], -1.0)
    loss, metrics = metrics_of(DPOConfig(reference_policy_kl_penalty=2.0), packed)
    assert loss == metrics["preference_loss"] == pytest.approx(math.log1p(math.exp(-2)), abs=1e-12)
    assert (metrics["accuracy"], metrics["rewards_chosen_mean"], metrics["rewards_rejected_mean"]) == (1.0, 2.0, 0.0)
    assert metrics["rewards_margin"] == 2.0
    smoothed, _ = metrics_of(DPOConfig(reference_policy_kl_penalty=2.0, label_smoothing=0.25), packed)
    assert smoothed == pytest.approx(0.75 * math.log1p(math.exp(-2)) + 0.25 * math.log1p(math.exp(2)), abs=1e-12)
    ipo, metrics = metrics_of(DPOConfig(preference_loss="ipo", reference_policy_kl_penalty=0.5), packed)
    assert ipo == pytest.approx((0.5 - 0 - 1) ** 2, abs=1e-12)  # h_c / 2 = 0.5 per token
    assert metrics["rewards_chosen_mean"] == 0.25
    averaged, _ = metrics_of(DPOConfig(reference_policy_kl_penalty=2.0, preference_average_log_probs=True), packed)
    assert averaged == pytest.approx(math.log1p(math.exp(-1)), abs=1e-12)
    free, _ = metrics_of(DPOConfig(reference_policy_kl_penalty=1.0, reference_free=True), packed)
    assert free == pytest.approx(math.log1p(math.exp(-2)), abs=1e-12)  # -1 against -3


def test_the_sft_term_is_of_the_chosen_answer():
    packed = by_hand([-0.5, -0.5], [-1.0, -1.0, -1.0], -1.0)
    summed, metrics = metrics_of(
        DPOConfig(sft_loss_weight=3.0, preference_loss_weight=0.0, sft_average_log_probs=False), packed
    )
    assert (summed, metrics["sft_loss"]) == (3.0, 1.0)
    averaged, _ = metrics_of(DPOConfig(sft_loss_weight=3.0, preference_loss_weight=0.0, sft_average_log_probs=True), packed)
    assert averaged == 1.5


def test_gradient_by_hand():
    """The gradient is -beta sigma(-beta (h_c - h_r)) for each token of the chosen answer, its opposite for the rejected
    one's.
    """
    packed = by_hand([-0.5, -0.5], [-1.0], -1.0)
    made(DPOConfig(reference_policy_kl_penalty=0.1)).loss(Outputs(packed.leaf), packed.batch, packed.counts).loss.backward()
    slope = 0.1 / (1 + math.exp(0.1 * 1.0))
    torch.testing.assert_close(packed.leaf.grad, torch.tensor([0, -slope, -slope, 0, slope], dtype=torch.float64))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_gradcheck(config: DPOConfig):
    packed = random_packed(LENGTHS)
    assert torch.autograd.gradcheck(
        lambda logprobs: made(config).loss(Outputs(logprobs=logprobs), packed.batch, packed.counts).loss, (packed.leaf,)
    )


# ---- invariance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_split_and_order_of_pairs_do_not_matter(config: DPOConfig):
    packed = random_packed(LENGTHS)

    def share(piece: Packed):
        return made(config).loss(Outputs(logprobs=piece.logprobs), piece.batch, packed.counts)

    assert_split_invariant(packed, CUTS_OF_PAIRS, share)


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="got a microbatch of 3 sequences"):
        split(torch.zeros(3))
    chosen, rejected = split(torch.zeros(1))
    assert len(chosen) == len(rejected) == 0


def test_needs():
    assert made(DPOConfig()).needs == Needs(reference=True)
    assert made(DPOConfig(reference_free=True)).needs == Needs()
