"""KTO: by hand, for every split of answers into microbatches, and the mismatched answers of a step."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.algorithms.kto import KTOConfig
from pipeline.types import GlobalCounts, Outputs, Sample
from tests.algorithms.made import made
from tests.algorithms.packed import assert_split_invariant, random_packed

LENGTHS = (7, 4, 3, 9, 5)
CUTS = ([[0, 1], [2, 3, 4]], [[4, 2, 0], [3], [1]], [[2, 3], [0, 1], [], [4]])
LABELS = (1.0, 0.0, 0.0, 1.0, 0.0)
CONFIGS = (KTOConfig(), KTOConfig(desirable_weight=1.5, undesirable_weight=0.5), KTOConfig("apo_zero_unpaired"))


def labeled(mean_kl: float, seed: int = 0):
    """Return (batch with labels, counts of its step)."""
    packed = random_packed(LENGTHS, seed)
    batch = replace(packed.batch, rewards=torch.tensor(LABELS, dtype=torch.float64), mean_kl=mean_kl)
    return replace(packed, batch=batch), GlobalCounts(packed.counts.tokens, len(LENGTHS), good=2)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_two_answers_by_hand():
    """h = 1 of the good answer and 3 of the bad one, z0 = 0.5, beta = 2: 1.5 (1 - sigma(1)) / 2 + 0.5 (1 - sigma(-5)) / 2."""
    packed = random_packed((3, 4))
    with torch.no_grad():
        packed.leaf.copy_(torch.tensor([0, -0.5, -0.5, 0, -1.0, -1.0, -1.0], dtype=torch.float64))
        packed.batch.reference_logprobs.copy_(torch.tensor([0, -1.0, -1.0, 0, -2.0, -2.0, -2.0], dtype=torch.float64))
        packed.batch.loss_mask.copy_(packed.batch.positions > 0)
        packed.batch.rewards.copy_(torch.tensor([1.0, 0.0]))
    config = KTOConfig(reference_policy_kl_penalty=2.0, desirable_weight=1.5, undesirable_weight=0.5)
    counts, batch = GlobalCounts(5, 2, good=1), replace(packed.batch, mean_kl=0.5)
    out = made(config).loss(Outputs(packed.leaf), batch, counts)
    assert out.loss.item() == pytest.approx(0.75 * (1 - sigma(1)) + 0.25 * (1 - sigma(-5)), abs=1e-12)
    metrics = {name: value.item() for name, value in out.metrics.items()}
    expected = {"rewards_chosen_mean": 2.0, "rewards_rejected_mean": 6.0, "rewards_margin": -4.0, "kl": 0.5}
    assert metrics == pytest.approx(expected)
    out.loss.backward()
    slopes = [0, *[-0.75 * 2 * sigma(1) * sigma(-1)] * 2, 0, *[0.25 * 2 * sigma(5) * sigma(-5)] * 3]
    torch.testing.assert_close(packed.leaf.grad, torch.tensor(slopes, dtype=torch.float64))


@pytest.mark.parametrize("config", CONFIGS)
def test_the_split_and_order_of_answers_do_not_matter(config):
    packed, counts = labeled(mean_kl=0.3 if config.preference_loss == "kto" else 0.0)
    algorithm = made(config)
    assert_split_invariant(packed, CUTS, lambda piece: algorithm.loss(Outputs(logprobs=piece.logprobs), piece.batch, counts))
    assert torch.autograd.gradcheck(lambda x: algorithm.loss(Outputs(logprobs=x), packed.batch, counts).loss, (packed.leaf,))


def test_a_step_without_good_answers_has_no_mean_of_them():
    packed, _ = labeled(0.0)
    batch = replace(packed.batch, rewards=torch.zeros(len(LENGTHS), dtype=torch.float64))
    out = made(KTOConfig()).loss(Outputs(packed.leaf), batch, GlobalCounts(9, len(LENGTHS)))
    assert out.loss.isfinite() and out.metrics["rewards_chosen_mean"].isnan()


# ---- mismatched answers ---------------------------------------------------------------------------------------------------


def sample(prompt: list[int], answer: list[int]) -> Sample:
    tokens, zeros = np.array([*prompt, *answer], np.int32), np.zeros(len(prompt) + len(answer), np.float32)
    return Sample(tokens, np.arange(len(tokens)) >= len(prompt), zeros, zeros)


def mismatched(samples: list[Sample], longest: int = 8) -> list[Sample]:
    algorithm = made(KTOConfig())
    algorithm.recipe.data.max_input_seq_length = longest
    return algorithm.mismatched(samples)


def texts(samples: list[Sample]) -> list[tuple[list[int], list[int]]]:
    return [(s.tokens[~s.loss_mask].tolist(), s.tokens[s.loss_mask].tolist()) for s in samples]


def test_answers_are_rotated_as_in_trl():
    found = mismatched([sample([1], [10, 11]), sample([2, 2], [20]), sample([3], [30])])
    assert texts(found) == [([1], [30]), ([2, 2], [10, 11]), ([3], [20])]


def test_both_answers_of_a_pair_get_other_prompts_answers():
    found = mismatched([sample([p], [10 * p + i]) for p in (1, 2, 3) for i in range(2)])
    assert texts(found) == [([p], [10 * (p - 1 or 3) + i]) for p in (1, 2, 3) for i in range(2)]


def test_prompts_differ_by_their_last_token_alone():
    """Token 0 has only zero bytes."""
    assert texts(mismatched([sample([5], [10]), sample([5, 0], [20])])) == [([5], [20]), ([5, 0], [10])]


def test_mismatched_answers_are_cut_to_the_longest_input():
    found = mismatched([sample([1, 1, 1], [10]), sample([2], [20, 21, 22])], longest=4)
    assert texts(found) == [([1, 1, 1], [20]), ([2], [10])]
    assert texts(mismatched([sample([1], [10])])) == [([1], [10])]
