"""Compute divergences of the policy from its teachers, over the teachers' most likely tokens or at the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.algorithms.reductions import apply_mask, masked_share, per_token
from pipeline.algorithms.sections import LossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch

LOG_INFINITESIMAL = -100.0  # NeMo-RL's, DistillationLossFn
LEAST_LOGPROB = 1e-8  # of a chunk whose log-prob can be divided by: compute_policy_loss_opd


def distillation_loss(
    config: LossConfig, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts, teachers: Sequence[str] = ()
) -> LossOutput:
    """Return this batch's share of the loss (GKD, https://arxiv.org/abs/2306.13649 eq. 4 with lambda = 1) and of its metrics.

    p is the teacher's distribution, and q is the policy's. The sums run over the teacher's k most likely tokens. The loss is
    the mean over all sampled tokens of the step:

        forward   sum_v p_v (log p_v - log q_v)
        reverse   sum_v q_v (log q_v - log p_v)
        mixed     mixed_kl_weight * forward + (1 - mixed_kl_weight) * reverse

        zero_outside_topk=false   p and q are both renormalized over the k tokens. Each kind is then a divergence: loss and
                                  gradient are 0 where the policy agrees with the teacher. The total mass of the k tokens
                                  does not enter the loss.
        zero_outside_topk=true    p is renormalized and q is not, so the loss also moves the policy's mass into the k tokens.
                                  The reverse divergence includes the other tokens, with log p = -100. Their sum of q log q
                                  follows from the policy's exact entropy.

    NeMo-RL does the same (nemo_rl/algorithms/loss/loss_functions.py, DistillationLossFn; nemo_rl/distributed/model_utils.py,
    get_distillation_topk_logprobs_from_logits).

    teachers: the names of the teachers for which to report separate metrics, if there are several.
    """
    assert batch.teacher is not None and outputs.top_k is not None
    of_teacher, of_policy = batch.teacher.logprobs, outputs.top_k.logprobs  # [T, K] each, of the same tokens
    teacher = of_teacher.log_softmax(-1)
    policy = of_policy if config.zero_outside_topk else of_policy.log_softmax(-1)
    p, q = teacher.exp(), policy.exp()
    forward = (p * (teacher - policy)).sum(-1)
    reverse = (q * (policy - teacher)).sum(-1)
    outside = config.zero_outside_topk and config.kl_type != "forward"  # a part of the loss is outside the k tokens
    if outside:
        assert outputs.entropy is not None
        entropy_of_rest = -outputs.entropy - (q * policy).sum(-1)  # sum of q log q outside the k tokens
        reverse = reverse + entropy_of_rest - LOG_INFINITESIMAL * (1 - q.sum(-1))
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": config.mixed_kl_weight}[config.kl_type]
    loss = masked_share(weight * forward + (1 - weight) * reverse, batch, counts)
    with torch.no_grad():
        metrics = {
            "forward_kl": masked_share(forward, batch, counts),
            "teacher_top_k_mass": masked_share(of_teacher.exp().sum(-1), batch, counts),
            "policy_top_k_mass": masked_share(of_policy.exp().sum(-1), batch, counts),
        }
        if outside or not config.zero_outside_topk:  # otherwise the part outside the k tokens is unknown
            metrics["reverse_kl"] = masked_share(reverse, batch, counts)
            metrics |= means_by_teacher("reverse_kl", reverse, batch, teachers)
        metrics |= means_by_teacher("forward_kl", forward, batch, teachers)
    return LossOutput(loss, metrics)


# ---- at the sampled tokens ---------------------------------------------------------------------------------------------------


def teacher_advantages(batch: PackedBatch) -> torch.Tensor:
    """Return A_t = log pi_teacher(y_t) - log pi_old(y_t), `[T]`, 0 where the mask is False (arXiv:2601.02780 eq. 8).

    The policy gradient with A_t is the gradient of the reverse divergence KL(pi || pi_teacher). NeMo-RL does the same
    (OPDAdvantageEstimator in nemo_rl/algorithms/advantage_estimator.py).

    A teacher with another vocabulary scores chunks of text, see pipeline/data/token_alignment.py. The difference of a chunk's
    log-probs is spread over its tokens in proportion to the policy's own log-probs (https://arxiv.org/abs/2606.09456 sec. 4;
    compute_policy_loss_opd in https://github.com/ivanniu/On-Policy-Distill), or equally if the policy gives the chunk
    probability 1:

        A_t = (log pi_teacher(c) - log pi_old(c)) log pi_old(y_t) / log pi_old(c)        for token t of chunk c

    So the advantages of a chunk add up to this difference, and a token that the policy is sure of has none. (The gradient of a
    chunk's divergence would give each of its tokens the whole difference.)
    """
    assert batch.teacher_logprobs is not None and batch.old_logprobs is not None
    old = apply_mask(batch.old_logprobs, batch)
    if batch.chunks is None:
        return apply_mask(batch.teacher_logprobs - old, batch)
    of_chunk, size = chunk_sums(old, batch.chunks), chunk_sums(torch.ones_like(old), batch.chunks)
    share = torch.where(of_chunk < -LEAST_LOGPROB, old / of_chunk, 1 / size)
    return apply_mask((batch.teacher_logprobs - of_chunk) * share, batch)


def chunk_sums(values: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """Return the sum over each token's chunk, at each token: `[T]` -> `[T]`. chunks: `PackedBatch.chunks`."""
    return torch.zeros_like(values).index_add(0, chunks, values)[chunks]


def teacher_metrics(batch: PackedBatch, counts: GlobalCounts, teachers: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return estimates of KL(pi_old || pi_teacher), as metrics: over all sampled tokens, and over each teacher's samples."""
    kl = -teacher_advantages(batch)
    return {"teacher_kl": masked_share(kl, batch, counts), **means_by_teacher("teacher_kl", kl, batch, teachers)}


def means_by_teacher(name: str, values: torch.Tensor, batch: PackedBatch, teachers: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return {metric: [sum, count]} for the mean of `values`, `[T]`, over the counted tokens of each teacher's samples."""
    metrics = {}
    for teacher in teachers:
        of_teacher = per_token(torch.tensor([scorer == teacher for scorer in batch.teachers], device=values.device), batch)
        weights = apply_mask(of_teacher.to(values.dtype), batch)
        metrics[f"{name}/{teacher}_weighted"] = torch.stack([(apply_mask(values, batch) * weights).sum(), weights.sum()])
    return metrics
