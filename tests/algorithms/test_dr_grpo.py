"""Dr. GRPO: advantages without the deviation, and a loss in which a token's weight does not depend on its answer's length."""

import numpy as np
import torch

from pipeline.algorithms.advantages import centered
from pipeline.algorithms.loss import policy_loss
from pipeline.config import AdvantageConfig, LossConfig
from tests.algorithms import reference
from tests.algorithms.groups import group_of
from tests.algorithms.sampled import gradient_of, largest_difference, outputs_of, random_sampled
from tests.algorithms.test_grpo import grpo

ESTIMATOR = AdvantageConfig(normalize_rewards=False, use_leave_one_out_baseline=False)


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    rng, differences = np.random.default_rng(1), []
    for size in (2, 3, 8):
        rewards = rng.normal(size=size)
        differences.append(np.abs(centered(rewards) - reference.group_advantages(rewards, False, False)).max())
    return {
        "Dr. GRPO": largest_difference(LossConfig(token_level_loss=True)),
        "Dr. GRPO, advantages": (len(differences), max(differences), None),
    }


def test_against_the_reference():
    for name, (_, loss, gradient) in largest_differences().items():
        assert loss < 1e-12 and (gradient is None or gradient < 1e-12), name


def test_advantages_by_hand():
    """Easy and hard prompts alike: a right answer's advantage is the share of wrong ones."""
    samples = grpo(estimator=ESTIMATOR).compute_advantages([group_of([1.0, 1.0, 1.0, 0.0]), group_of([1.0, 0.0, 0.0, 0.0])])
    assert [sample.advantages[-1] for sample in samples] == [0.25, 0.25, 0.25, -0.75, 0.75, -0.25, -0.25, -0.25]


def test_a_tokens_weight_does_not_depend_on_its_answers_length():
    packed = random_sampled(0, old=False)
    out = policy_loss(LossConfig(token_level_loss=True), outputs_of(packed), packed.batch, packed.counts)
    weights = gradient_of(out.loss, packed) / -packed.batch.advantages
    assert torch.allclose(weights[packed.batch.loss_mask], torch.tensor(1 / packed.counts.tokens, dtype=torch.float64))
