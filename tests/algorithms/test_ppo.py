"""PPO: generalized advantage estimation on packed sequences, the critic's loss, and the models that a step trains."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipeline.algorithms.algorithm import Needs
from pipeline.algorithms.loss import value_loss
from pipeline.algorithms.ppo import PPO
from pipeline.algorithms.sections import GAEConfig
from pipeline.algorithms.token_advantages import discounted_sums, estimate_gae, gather_counted, scatter_counted
from pipeline.config import LossConfig, PPOConfig, ValueLossConfig
from pipeline.train.outputs import explained_variance
from tests.algorithms import reference
from tests.algorithms.groups import group_of
from tests.algorithms.made import made
from tests.algorithms.packed import Packed, differences, piece_of
from tests.algorithms.sampled import (
    CUTS,
    assert_gradcheck,
    assert_split_invariant,
    gradient_of,
    outputs_of,
    random_sampled,
)

IN_REWARD = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.3)
ESTIMATORS = {
    "lambda 0.95": (GAEConfig(), LossConfig()),
    "gamma 0.9, lambda 0.8": (GAEConfig(gae_gamma=0.9, gae_lambda=0.8), LossConfig()),
    "lambda 0": (GAEConfig(gae_lambda=0.0), LossConfig()),
    "lambda 1, KL in the reward": (GAEConfig(gae_lambda=1.0), IN_REWARD),
    "decoupled": (GAEConfig(gae_lambda_value=1.0, gae_lambda_policy=0.7), LossConfig()),
    "length-adaptive": (GAEConfig(gae_lambda_value=1.0, length_adaptive_alpha=0.4), LossConfig()),
}
CRITICS = {
    "clipped": ValueLossConfig(cliprange=0.2),
    "unclipped": ValueLossConfig(cliprange=None),
    "scaled": ValueLossConfig(scale=0.25, cliprange=1.0),
}


def ppo(loss: LossConfig | None = None, updates: int = 1, **keys) -> PPO:
    return made(PPOConfig(**keys), loss or LossConfig(), updates=updates)


def largest_differences() -> dict[str, tuple[int, float, float | None]]:
    found = {}

    def case(config: ValueLossConfig, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = random_sampled(seed)
        loss = value_loss(config, outputs_of(packed), packed.batch, packed.counts).loss
        return loss, reference.value_loss(config, packed, packed.leaf), packed.leaf

    for name, config in CRITICS.items():
        found[f"PPO, critic, {name}"] = differences(case(config, seed) for seed in range(8))
    for name, (gae, loss) in ESTIMATORS.items():
        errors = []
        for seed in range(8):
            packed = random_sampled(seed, reference=True)
            pairs = zip(estimate_gae(packed.batch, gae, loss), reference.gae(gae, loss, packed), strict=True)
            errors += [(one - other).abs().max().item() for one, other in pairs]
        found[f"GAE, {name}, advantages and returns"] = len(errors), max(errors), None
    return found


def test_against_the_reference():
    differences = largest_differences()
    assert len(differences) == 9
    for name, (_, loss, gradient) in differences.items():
        assert loss < 1e-12 and (gradient is None or gradient < 1e-12), name


# ---- advantages and returns ---------------------------------------------------------------------------------------------


def by_hand() -> Packed:
    """Return a sequence of 6 tokens, of which 2, 3 and 5 count. The values before those are 1, 2 and 3; the reward is 10."""
    packed = random_sampled(0, reference=True, lengths=(6,))
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False, False, True, True, False, True]),
        old_values=torch.tensor([99.0, 1.0, 2.0, 99.0, 3.0, 99.0], dtype=torch.float64),
        rewards=torch.tensor([10.0], dtype=torch.float64),
        old_logprobs=torch.full((6,), -1.0, dtype=torch.float64),
        reference_logprobs=torch.full((6,), -1.5, dtype=torch.float64),
    )
    return replace(packed, batch=batch)


def test_one_step_errors_by_hand():
    """With lambda 0 an advantage is the next value less this one. After token 3 comes 5, past the uncounted token."""
    advantages, returns = estimate_gae(by_hand().batch, GAEConfig(gae_gamma=0.5, gae_lambda=0.0), LossConfig())
    assert advantages.tolist() == [0, 0, 0.5 * 2 - 1, 0.5 * 3 - 2, 0, 10 - 3]
    assert returns.tolist() == [0, 0, 1.0, 1.5, 0, 10]


def test_whole_returns_by_hand():
    """With lambda 1 an advantage is the discounted future reward less the value, whatever the later values."""
    advantages, returns = estimate_gae(by_hand().batch, GAEConfig(gae_gamma=0.5, gae_lambda=1.0), LossConfig())
    assert returns.tolist() == [0, 0, 2.5, 5, 0, 10]
    assert advantages.tolist() == [0, 0, 1.5, 3, 0, 7]


def test_in_between_by_hand():
    """Here gamma lambda = 1/2 and the errors are 1, 1, 7."""
    advantages, _ = estimate_gae(by_hand().batch, GAEConfig(gae_lambda=0.5), LossConfig())
    assert advantages.tolist() == [0, 0, 1 + 0.5 + 0.25 * 7, 1 + 0.5 * 7, 0, 7]


def test_kl_in_the_reward_by_hand():
    """Here k1 is 0.5 at each token, beta 2."""
    config = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=2.0, reference_policy_kl_type="k1")
    _, returns = estimate_gae(by_hand().batch, GAEConfig(gae_lambda=1.0), config)
    assert returns.tolist() == [0, 0, 7, 8, 0, 9]


def test_decoupled_by_hand():
    """The critic learns whole returns, the policy one-step errors."""
    advantages, returns = estimate_gae(by_hand().batch, GAEConfig(gae_lambda_value=1.0, gae_lambda_policy=0.0), LossConfig())
    assert advantages.tolist() == [0, 0, 1, 1, 0, 7] and returns.tolist() == [0, 0, 10, 10, 0, 10]


@pytest.mark.parametrize(("alpha", "decay"), [(2 / 3, 0.5), (1 / 3, 0.0), (0.1, 0.0), (100.0, 1 - 1 / 300)])
def test_length_adaptive_by_hand(alpha, decay):
    """Lambda is 1 - 1 / (alpha 3), and at least 0."""
    advantages, _ = estimate_gae(by_hand().batch, GAEConfig(length_adaptive_alpha=alpha), LossConfig())
    expected = [0, 0, 1 + decay + decay**2 * 7, 1 + decay * 7, 0, 7]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))


def test_a_perfect_critic_leaves_no_advantage():
    packed = by_hand()
    batch = replace(packed.batch, old_values=torch.full((6,), 10.0, dtype=torch.float64))
    for lam in (0.0, 0.3, 1.0):
        advantages, returns = estimate_gae(batch, GAEConfig(gae_lambda=lam), LossConfig())
        assert not advantages.any() and torch.equal(returns, torch.where(batch.loss_mask, 10.0, 0.0).double())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_split_and_order_of_sequences_do_not_change_estimates(name):
    gae, loss = ESTIMATORS[name]
    packed = random_sampled(1, reference=True)
    advantages, returns = estimate_gae(packed.batch, gae, loss)
    whole = replace(packed, batch=replace(packed.batch, advantages=advantages, returns=returns))
    assert CUTS
    for members in itertools.chain(*CUTS):
        piece = piece_of(packed, members).batch
        expected = piece_of(whole, members).batch
        found = estimate_gae(piece, gae, loss)
        torch.testing.assert_close(found[0], torch.where(piece.loss_mask, expected.advantages, 0.0), rtol=0, atol=1e-13)
        torch.testing.assert_close(found[1], torch.where(piece.loss_mask, expected.returns, 0.0), rtol=0, atol=1e-13)


def test_discounted_sums_of_every_length():
    for columns in (1, 2, 3, 8, 9):
        terms = torch.randn(2, columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)
        decay = torch.tensor([[0.9], [0.0]], dtype=torch.float64)
        found = discounted_sums(terms, decay)
        for row, column in itertools.product(range(2), range(columns)):
            expected = sum(decay[row, 0] ** k * term for k, term in enumerate(terms[row, column:]))
            assert found[row, column].item() == pytest.approx(expected.item())


def test_rows_gather_counted_tokens_and_scatter_them_back():
    packed = random_sampled(2)
    values = torch.arange(len(packed.leaf), dtype=torch.float64) + 1
    gathered = gather_counted(values, packed.batch)
    assert gathered.shape == (len(packed.batch.lengths), max(map(len, reference.counted_positions(packed))))
    assert torch.equal(scatter_counted(gathered, packed.batch), torch.where(packed.batch.loss_mask, values, 0.0))


def test_estimate_puts_advantages_and_returns_in_the_batch():
    packed = random_sampled(3)
    found = ppo().estimate(packed.batch)
    advantages, returns = estimate_gae(packed.batch, GAEConfig(), LossConfig())
    assert torch.equal(found.advantages, advantages) and torch.equal(found.returns, returns)
    assert torch.equal(found.loss_mask, packed.batch.loss_mask)


def test_estimate_leaves_sequences_out():
    packed = random_sampled(3)
    kept = set()
    for threshold in (1.2, 1.3, 1.4, 1.5):
        found = ppo(seq_logprob_error_threshold=threshold).estimate(packed.batch)
        masks = zip(found.loss_mask.split(found.lengths), packed.batch.loss_mask.split(found.lengths), strict=True)
        assert all(torch.equal(mask, before) or not mask.any() for mask, before in masks)
        assert not found.advantages[~found.loss_mask].any()
        kept.add(int(found.loss_mask.sum()))
    assert len(kept) > 1 and max(kept) <= packed.counts.tokens


# ---- the losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CRITICS)
def test_the_split_and_order_of_sequences_do_not_change_the_critics_loss(name):
    assert_split_invariant(partial(value_loss, CRITICS[name]), random_sampled(1))


def test_gradcheck():
    for config in CRITICS.values():
        assert_gradcheck(partial(value_loss, config), random_sampled(2))


def test_critics_loss_by_hand():
    """Check two counted tokens; the values before them, which follow the tokens before them, are 1 and 3.

    The first moved by 1 of 0.5 away from its return, so that the error is the unbounded one; the second by 2 towards it, so
    that the bound counts.
    """
    packed = random_sampled(0, lengths=(4,))
    with torch.no_grad():
        packed.leaf.copy_(torch.tensor([99.0, 1.0, 3.0, 99.0]))
    batch = replace(
        packed.batch,
        loss_mask=torch.tensor([False, False, True, True]),
        old_values=torch.tensor([99.0, 0.0, 1.0, 99.0], dtype=torch.float64),
        returns=torch.tensor([0.0, 0.0, -1.0, 3.0], dtype=torch.float64),
    )
    packed = replace(packed, batch=batch)
    out = value_loss(ValueLossConfig(scale=2.0, cliprange=0.5), outputs_of(packed), batch, packed.counts)
    assert out.loss.item() == 2.0 * 0.5 * ((1 + 1) ** 2 + (1.5 - 3) ** 2) / 2
    assert gradient_of(out.loss, packed).tolist() == [0.0, 2.0, 0.0, 0.0]
    metrics = out.metrics
    assert metrics["value_clip_fraction"] == 0.5 and metrics["values_mean"] == 2 and metrics["returns_mean"] == 1
    assert metrics["values_max"] == 3 and metrics["values_min"] == 1
    # Returns -1 and 3 have a variance of 4, what is left of them (-2 and 0) one of 1.
    assert explained_variance(*metrics["explained_variance_moments"].tolist()) == 1 - 1 / 4


def test_a_perfect_critic_explains_all_variance_and_a_constant_none():
    packed = random_sampled(4)
    for values, expected in ((torch.roll(packed.batch.returns, -1), 1.0), (torch.full_like(packed.leaf, 7.0), 0.0)):
        with torch.no_grad():
            packed.leaf.copy_(values)
        out = value_loss(ValueLossConfig(cliprange=None), outputs_of(packed), packed.batch, packed.counts)
        moments = out.metrics["explained_variance_moments"].tolist()
        assert explained_variance(*moments) == pytest.approx(expected, abs=1e-12)
    assert explained_variance(2.0, 4.0, 0.0, 0.0) == 1  # of returns that do not vary: no division by 0


# ---- the algorithm ----------------------------------------------------------------------------------------------------


def test_needs_follow_from_the_recipe():
    plain = Needs(truncated=True, critic=True, estimates=True, standardized="unbiased")
    assert ppo().needs == plain
    assert ppo(updates=2).needs == replace(plain, old=True, old_of_first=False)
    assert ppo(ppo_epochs=3).needs == replace(plain, old=True, epochs=3)
    assert ppo(LossConfig(force_on_policy_ratio=True)).needs == plain
    assert ppo(LossConfig(use_generation_logprobs=True), ppo_epochs=3).needs == replace(plain, epochs=3)
    assert ppo(IN_REWARD).needs == replace(plain, old=True, reference=True)
    assert ppo(seq_logprob_error_threshold=2.0).needs == replace(plain, old=True)
    assert ppo(adv_estimator=GAEConfig(normalize_advantages=False)).needs == replace(plain, standardized=None)
    assert ppo(LossConfig(log_entropy=True)).needs == replace(plain, entropy=True)


def test_the_critic_learns_alone_at_first():
    algorithm = ppo(policy_training_start_step=2)
    assert [algorithm.trains(step) for step in range(4)] == [("critic",)] * 2 + [("critic", "policy")] * 2
    assert set(algorithm.losses) == {"policy", "critic"}
    assert ppo().trains(0) == ("critic", "policy")


def test_advantages_are_left_to_the_estimate():
    first, second = ppo().compute_advantages([group_of([1.0, 0.25], lengths=[2, 1])])
    assert first.reward == 1.0 and second.reward == 0.25
    assert first.tokens.tolist() == [5, 6, 7, 8] and first.loss_mask.tolist() == [False, False, True, True]
    assert not first.advantages.any() and not second.advantages.any()
