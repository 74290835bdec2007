"""KL divergence of the policy from the reference, estimated from the tokens that the policy drew.

With x = log pi_ref(y_t) - log pi(y_t), Schulman's estimates (http://joschu.net/blog/kl-approx.html):

    k1 = -x        k2 = x^2 / 2        k3 = exp(x) - 1 - x

In a loss the tokens' own distribution is what is differentiated, so the estimate carries a factor
(https://arxiv.org/abs/2506.09477): exp(log pi - sg(log pi)), which is 1 and has the score-function term as its gradient; with
use_on_policy_kl_approximation pi / pi_generate, which also corrects for tokens that another policy drew. kl_input_clamp_value
bounds x, kl_output_clamp_value the estimate with its factor, as in NeMo-RL; beyond a bound there is no gradient.

Both are whole distributions, also where sampling is truncated: the estimate is then of the tokens that could be drawn.

Left out: the exact divergence over the whole vocabulary.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.reductions import counted
from pipeline.config import LossConfig
from pipeline.types import PackedBatch


def estimate_kl(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    kind: str,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate of KL(pi || reference) at each token drawn from pi, times `weight`: `[T]` each. The clamps bound x, and the
    product, to plus or minus their value."""
    x = reference - logprobs
    if input_clamp is not None:
        if weight is not None:
            weight = torch.where(x.abs() <= input_clamp, weight, weight.detach())
        x = x.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        kl = -x
    elif kind == "k2":
        kl = x.square() / 2
    elif kind == "k3":
        kl = torch.exp(x) - 1 - x
    else:
        raise ValueError(f"unknown KL estimate '{kind}'")
    if weight is not None:
        kl = weight * kl
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def kl_in_loss(logprobs: torch.Tensor, batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """`[T]`, 0 where the mask is False: what `reference_policy_kl_penalty` multiplies."""
    drawn_from = batch.generate_logprobs if config.use_on_policy_kl_approximation else logprobs.detach()
    return _estimate(logprobs, batch, config, weight=torch.exp(counted(logprobs - drawn_from, batch)))


def kl_in_reward(batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """`[T]`, 0 where the mask is False: of the policy before the step's first update. It has no gradient."""
    old = batch.old_logprobs if batch.old_full_logprobs is None else batch.old_full_logprobs
    return _estimate(old, batch, config, weight=None)


def _estimate(logprobs: torch.Tensor, batch: PackedBatch, config: LossConfig, weight: torch.Tensor | None) -> torch.Tensor:
    kl = estimate_kl(
        counted(logprobs, batch),
        counted(batch.reference_logprobs, batch),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
        weight,
    )
    return counted(kl, batch)
