"""Reward model: by hand, against a padded float64 reference written from the papers, and for every split of pairs.

Ours was once compared with TRL 1.16's own code (`RewardTrainer.compute_loss`) on the same rewards and margins: equal.
"""

import math

import pytest
import torch

from pipeline.algorithms.pairs import reward_model_loss
from pipeline.types import GlobalCounts, LossOutput, Outputs
from tests.algorithms.packed import CUTS_OF_PAIRS, Packed, assert_split_invariant, differences, random_packed

LENGTHS = (7, 4, 3, 9, 5, 5, 2, 8)  # chosen, rejected, chosen, rejected ...


def share_of(piece: Packed, counts: GlobalCounts) -> LossOutput:
    return reward_model_loss(Outputs(values=piece.logprobs), piece.batch, counts)


def reference_loss(values: torch.Tensor, lengths: tuple[int, ...], margins: torch.Tensor) -> torch.Tensor:
    """Compute Llama 2's eq. 2 on padded rows `[2P, L]`; margins `[P]`."""
    scores = [row[length - 1] for row, length in zip(values, lengths, strict=True)]
    wrong = [1 / (1 + torch.exp(scores[2 * i] - scores[2 * i + 1] - margin)) for i, margin in enumerate(margins)]
    return sum(-torch.log(1 - w) for w in wrong) / len(wrong)


def largest_differences() -> dict[str, tuple[int, float, float]]:
    def case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = random_packed(LENGTHS, seed)
        rows = torch.nn.utils.rnn.pad_sequence(packed.sequences("logprobs"), batch_first=True)
        expected = reference_loss(rows, packed.batch.lengths, packed.batch.rewards[0::2])
        return share_of(packed, packed.counts).loss, expected, packed.leaf

    return {"reward model": differences(map(case, range(10)))}


def test_against_the_reference():
    ((cases, loss, gradient),) = largest_differences().values()
    assert cases == 10 and loss < 1e-14 and gradient < 1e-14


def test_two_pairs_by_hand():
    """Scores are the values at the last tokens: 2 against 0 with margin 1, -1 against 0.5 without one."""
    packed = random_packed((3, 2, 2, 4))
    with torch.no_grad():
        packed.leaf.copy_(torch.tensor([9, 9, 2, 9, 0, 9, -1, 9, 9, 9, 0.5], dtype=torch.float64))
        packed.batch.rewards.copy_(torch.tensor([1.0, 7.0, 0.0, 7.0]))  # those of rejected answers are not looked at
    out = share_of(packed, packed.counts)
    assert out.loss.item() == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(1.5))) / 2, abs=1e-12)
    assert {name: value.item() for name, value in out.metrics.items()} == {
        "accuracy": 0.5,
        "rewards_chosen_mean": 0.5,
        "rewards_rejected_mean": 0.25,
        "rewards_margin": 0.25,
    }
    out.loss.backward()
    slopes = [-1 / (1 + math.exp(1)) / 2, -1 / (1 + math.exp(-1.5)) / 2]
    expected = torch.zeros(11, dtype=torch.float64)
    expected[[2, 4, 6, 10]] = torch.tensor([slopes[0], -slopes[0], slopes[1], -slopes[1]], dtype=torch.float64)
    torch.testing.assert_close(packed.leaf.grad, expected)


def test_equal_rewards_without_a_margin():
    packed = random_packed(LENGTHS)
    with torch.no_grad():
        packed.leaf.fill_(0.3)
        packed.batch.rewards.zero_()
    assert share_of(packed, packed.counts).loss.item() == pytest.approx(math.log(2), abs=1e-12)


def test_gradcheck():
    packed = random_packed(LENGTHS)
    assert torch.autograd.gradcheck(
        lambda values: reward_model_loss(Outputs(values=values), packed.batch, packed.counts).loss, (packed.leaf,)
    )


def test_the_split_and_order_of_pairs_do_not_matter():
    packed = random_packed(LENGTHS)
    assert_split_invariant(packed, CUTS_OF_PAIRS, lambda piece: share_of(piece, packed.counts))
