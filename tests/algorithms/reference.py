"""A second implementation of losses and estimators, from the papers, on padded rows in float64 or term by term.

Nothing here is the pipeline's but the containers. Rows are sequences, columns tokens; `mask` is 1 where a token counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from pipeline.algorithms.sections import GAEConfig
from pipeline.config import LossConfig, ValueLossConfig
from tests.algorithms.packed import Packed


def rows(packed: Packed, values: torch.Tensor) -> torch.Tensor:
    """Return `[T]` as `[S, L]`; 0 where nothing counts."""
    values = torch.where(packed.batch.loss_mask, values, 0.0)
    return torch.nn.utils.rnn.pad_sequence(values.split(packed.batch.lengths), batch_first=True)


def policy_loss(config: LossConfig, packed: Packed, entropy: torch.Tensor | None = None) -> torch.Tensor:
    """Return the loss with every key of `LossConfig` that affects a policy."""
    batch = packed.batch
    mask = rows(packed, torch.ones_like(packed.logprobs))
    now, generate, advantage = (rows(packed, v) for v in (packed.logprobs, batch.generate_logprobs, batch.advantages))
    stale = batch.old_logprobs is not None and not config.force_on_policy_ratio
    old = rows(packed, batch.old_logprobs) if stale else now.detach()
    old = generate if config.use_generation_logprobs else old
    lengths = mask.sum(1, keepdim=True)
    losses = -_objective(config, now, old, advantage, mask, lengths) * _weights(config, old, generate, mask, lengths)
    losses = losses + config.drift_penalty * (now - old) ** 2
    penalty = 0.0 if config.use_kl_in_reward else config.reference_policy_kl_penalty
    if penalty:
        drawn = generate if config.use_on_policy_kl_approximation else now.detach()
        factor = torch.exp(now - drawn) if config.reference_policy_kl_gradient == "kl" else torch.ones_like(now)
        losses = losses + penalty * kl(config, now, rows(packed, batch.reference_logprobs), factor)
    if config.token_level_loss:
        loss = (losses * mask).sum() / mask.sum()
    else:
        loss = ((losses * mask).sum(1, keepdim=True) / lengths).mean()
    if entropy is not None:
        loss = loss - config.entropy_coeff * rows(packed, entropy).sum() / mask.sum()
    return loss


def _objective(
    config: LossConfig,
    now: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Return the clipped surrogate as in Spinning Up: the ratio is bounded above for A > 0, below for A < 0."""
    if config.disable_ppo_ratio:
        return advantage * now
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    if config.use_cispo:
        weight = torch.tensor(np.clip(torch.exp(now - old).detach().numpy(), low, high))
        return weight * advantage * now
    ratio = torch.exp(now - old)
    if config.use_sapo:
        taus = torch.tensor([config.sapo_temperature_negative, config.sapo_temperature_positive], dtype=torch.float64)
        tau = taus[(advantage > 0).long()]
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if config.use_dppo:
        rise = torch.sign(advantage) * (now.detach().exp() - old.exp())
        most = torch.where(advantage > 0, config.ratio_clip_max, config.ratio_clip_min)
        return advantage * ratio * (rise <= most)
    if config.sequence_level_importance_ratios:
        whole = torch.prod(torch.where(mask == 1, ratio, 1.0), 1, keepdim=True) ** (1 / lengths)
        ratio = whole.detach() * torch.exp(now) / torch.exp(now.detach())  # GSPO-token's
    most = float("inf") if config.ratio_clip_c is None else config.ratio_clip_c
    good = torch.where(ratio > high, high, ratio)
    bad = torch.where(ratio < low, low, torch.where(ratio > most, most, ratio))
    return torch.where(advantage > 0, good, bad) * advantage


def _weights(
    config: LossConfig, old: torch.Tensor, generate: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    if not config.use_importance_sampling_correction:
        return torch.ones_like(old)
    weight = torch.exp(old) / torch.exp(generate)
    if config.sequence_level_importance_ratios or config.sequence_level_importance_weights:
        weight = torch.prod(torch.where(mask == 1, weight, 1.0), 1, keepdim=True).expand_as(old)
    kind, low = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio
    if kind == "tis":
        return torch.tensor(np.clip(weight.numpy(), low, high))
    if kind == "icepop":
        return weight * (weight >= low) * (weight <= high)
    if kind == "seq-mask-tis":
        mean = torch.exp(((old - generate) * mask).sum(1, keepdim=True) / lengths)
        return weight * (mean >= low) * (mean <= high)
    return weight


def kl(config: LossConfig, now: torch.Tensor, frozen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return Schulman's estimates; a bound is a number, which has no gradient."""
    log_ratio, most = now - frozen, config.kl_input_clamp_value
    if most is not None:
        beyond = log_ratio.abs() > most
        log_ratio = torch.where(beyond, most * log_ratio.detach().sign(), log_ratio)
        weight = torch.where(beyond, weight.detach(), weight)
    estimate = {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": torch.exp(-log_ratio) - 1 + log_ratio,
    }[config.reference_policy_kl_type] * weight
    most = config.kl_output_clamp_value
    return estimate if most is None else torch.where(estimate.abs() > most, most * estimate.detach().sign(), estimate)


def group_advantages(rewards: np.ndarray, leave_one_out: bool, normalize: bool) -> list[float]:
    """Return GRPO's advantages, reward by reward."""
    found = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i] if leave_one_out else list(rewards)
        mean = sum(others) / len(others)
        variance = sum((r - mean) ** 2 for r in others) / (len(others) - 1) if len(others) > 1 else 0.0
        found.append((reward - mean) / (variance**0.5 + 1e-6) if normalize and variance > 1e-20 else reward - mean)
    return found


def turn_advantages(
    rewards: Sequence[Sequence[float]], discount: float, leave_one_out: bool, normalize: bool
) -> list[list[float]]:
    """Return the advantages of episodes' turns from their rewards, turn by turn; of the whole episode where nobody else is."""
    whole = group_advantages(np.array([sum(of_episode) for of_episode in rewards]), leave_one_out, normalize)
    found = []
    for i, of_episode in enumerate(rewards):
        found.append([])
        for k in range(len(of_episode)):
            there = [j for j, other in enumerate(rewards) if len(other) > k]
            returns = [sum(discount ** (n - k) * rewards[j][n] for n in range(k, len(rewards[j]))) for j in there]
            compared = group_advantages(np.array(returns), leave_one_out, normalize) if len(there) > 1 else [whole[i]]
            found[-1].append(compared[there.index(i)])
    return found


def reinforce_plus_plus(config: LossConfig, packed: Packed, rewards: np.ndarray) -> torch.Tensor:
    """Return `[T]`: standardized advantages of sequences with these rewards, 0 where nothing counts."""
    batch, found = packed.batch, torch.zeros_like(packed.leaf)
    for reward, positions in zip(rewards, counted_positions(packed), strict=True):
        for i, t in enumerate(positions):
            to_come = 0.0
            if config.use_kl_in_reward:
                to_come = sum(_kl_of_token(config, batch.old_logprobs[s], batch.reference_logprobs[s]) for s in positions[i:])
            found[t] = reward - config.reference_policy_kl_penalty * to_come
    everything = found[batch.loss_mask]
    deviation = ((everything - everything.mean()) ** 2).mean().sqrt()
    return torch.where(batch.loss_mask, (found - everything.mean()) / deviation, 0.0)


def gae(gae: GAEConfig, loss: LossConfig, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns) `[T]` each: every sum written out, sequence by sequence and token by token."""
    batch = packed.batch
    advantages, returns = torch.zeros_like(packed.leaf), torch.zeros_like(packed.leaf)
    for reward, positions in zip(batch.rewards.tolist(), counted_positions(packed), strict=True):
        values = [batch.old_values[t - 1].item() for t in positions] + [0.0]
        gains = [0.0] * len(positions)
        if positions:
            gains[-1] += reward
        if loss.use_kl_in_reward:
            for i, t in enumerate(positions):
                gains[i] -= loss.reference_policy_kl_penalty * _kl_of_token(
                    loss, batch.old_logprobs[t], batch.reference_logprobs[t]
                )
        policy, critic = gae.gae_lambda, gae.gae_lambda
        if gae.gae_lambda_policy is not None:
            policy = gae.gae_lambda_policy
        if gae.gae_lambda_value is not None:
            critic = gae.gae_lambda_value
        if gae.length_adaptive_alpha > 0 and positions:
            policy = max(0.0, 1 - 1 / (gae.length_adaptive_alpha * len(positions)))
        errors = [gains[i] + gae.gae_gamma * values[i + 1] - values[i] for i in range(len(positions))]
        for i, t in enumerate(positions):
            for to, decay in ((advantages, gae.gae_gamma * policy), (returns, gae.gae_gamma * critic)):
                to[t] = sum(decay**k * error for k, error in enumerate(errors[i:]))
            returns[t] += values[i]
    return advantages, returns


def value_loss(config: ValueLossConfig, packed: Packed, values: torch.Tensor) -> torch.Tensor:
    """Return the loss, computed token by token."""
    batch, terms = packed.batch, []
    for t in (t for positions in counted_positions(packed) for t in positions):
        now, before, target = values[t - 1], batch.old_values[t - 1].item(), batch.returns[t].item()
        error = (now - target) ** 2
        if config.cliprange is not None:
            bounded = min(max(now.item(), before - config.cliprange), before + config.cliprange)
            if (bounded - target) ** 2 > error:
                error = torch.tensor((bounded - target) ** 2, dtype=torch.float64)
        terms.append(error)
    return config.scale * 0.5 * sum(terms) / len(terms)


def counted_positions(packed: Packed) -> list[list[int]]:
    """Return the positions of each sequence's counted tokens in the batch."""
    starts = packed.batch.cu_seqlens.tolist()
    mask = packed.batch.loss_mask.tolist()
    return [[t for t in range(a, b) if mask[t]] for a, b in itertools.pairwise(starts)]


def _kl_of_token(config: LossConfig, now: torch.Tensor, frozen: torch.Tensor) -> float:
    return kl(config, now, frozen, torch.ones((), dtype=torch.float64)).item()
