"""The divergence of the policy from a teacher over the tokens that the teacher finds most likely."""

from __future__ import annotations

import torch

from pipeline.algorithms.reductions import masked_share
from pipeline.algorithms.sections import LossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch

LOG_INFINITESIMAL = -100.0  # NeMo-RL's, DistillationLossFn


def distillation_loss(config: LossConfig, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
    """Return this batch's share of the loss (GKD, https://arxiv.org/abs/2306.13649 eq. 4 with lambda = 1) and of its metrics.

    p is the teacher's distribution and q the policy's. The sums run over the teacher's k most likely tokens. The loss is the
    mean over all sampled tokens of the step:

        forward   sum_v p_v (log p_v - log q_v)
        reverse   sum_v q_v (log q_v - log p_v)
        mixed     mixed_kl_weight * forward + (1 - mixed_kl_weight) * reverse

        zero_outside_topk=false   p and q are both renormalized over the k tokens. Each kind is then a divergence: loss and
                                  gradient are 0 where the policy agrees with the teacher. The total mass of the k tokens
                                  does not enter the loss.
        zero_outside_topk=true    p is renormalized and q is not, so the loss also moves the policy's mass into the k tokens.
                                  The reverse divergence includes the other tokens, with log p = -100; the policy's part of that
                                  sum follows from its exact entropy.

    NeMo-RL does the same (nemo_rl/algorithms/loss/loss_functions.py, DistillationLossFn; nemo_rl/distributed/model_utils.py,
    get_distillation_topk_logprobs_from_logits).
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
    return LossOutput(loss, metrics)
