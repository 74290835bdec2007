"""Compute the distance of the policy's distributions from those of a teacher with another vocabulary: ULD and GOLD.

Distributions are compared at the last token of each chunk of text (pipeline/data/token_alignment.py), times the probability of
the chunk's earlier tokens: by the chain rule, entry v is the probability of the chunk with v as its last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.algorithms.divergence import chunk_sums, means_by_teacher
from pipeline.algorithms.reductions import masked_share
from pipeline.algorithms.sections import LossConfig
from pipeline.types import NO_TOKEN, GlobalCounts, LossOutput, Outputs, PackedBatch, TopK

LEAST = -18.420680743952367  # log 1e-8: TRL's bound of the log-probs of earlier and of matched tokens


def earlier_logprobs(logprobs: torch.Tensor, is_last: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of the tokens of each token's chunk but the last one, `[T]`."""
    return chunk_sums(torch.where(is_last, 0.0, logprobs.clamp(min=LEAST)), chunks)


def candidates(teacher: TopK, own: TopK, matched: torch.Tensor | None) -> TopK:
    """Return the policy's tokens whose probabilities are compared with the teacher's, and the teacher's log-probs of them.

    teacher: its most likely tokens, in its ids, `[T, K]`. own: the policy's, likewise. matched: the policy's id of each token
    of the teacher with the same text, NO_TOKEN for the others; None: ULD, which compares none by its text.

        first K columns, only with `matched`     the policy's id of each matched token of the teacher
        last K columns                           the policy's tokens that are not matched, and the log-probs of the teacher's
                                                 that are not, the most likely first: column i compares those of rank i

    NO_TOKEN and -inf stand where there is no token.
    """
    if matched is None:
        return TopK(own.tokens, teacher.logprobs)
    known = teacher.tokens < len(matched)
    of_policy = torch.where(known, matched[teacher.tokens.clamp(max=len(matched) - 1)], NO_TOKEN)
    is_matched = of_policy != NO_TOKEN
    alone = torch.where(torch.isin(own.tokens, matched), NO_TOKEN, own.tokens)
    of_alone = teacher.logprobs.masked_fill(is_matched, -torch.inf).sort(-1, descending=True).values
    return TopK(
        torch.cat([of_policy, alone], -1), torch.cat([teacher.logprobs.masked_fill(~is_matched, -torch.inf), of_alone], -1)
    )


def universal_logit_loss(
    config: LossConfig, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts, teachers: Sequence[str] = ()
) -> LossOutput:
    """Return this batch's share of the loss, the mean over the chunks of the step, and of its metrics.

    p is the teacher's distribution of a chunk, and q is the policy's. The sums run over the teacher's and over the policy's k
    most likely tokens; the policy's are those before the step.

        uld     sum_i |p_(i) - q_(i)|, of the i-th most likely tokens          ULD, https://arxiv.org/abs/2402.12030 eq. 4
        gold    uld_hybrid_matched_weight * divergence of the tokens with the same text in both vocabularies
                + uld_hybrid_unmatched_weight * ULD's sum over the other tokens

    The divergence is mixed_kl_weight * sum p (log p - log q) + (1 - mixed_kl_weight) * sum q (log q - log p). TRL does the same
    with weights of 0 and 1, its beta of 1 and 0 (ULDLoss in trl/experimental/gold/gold_trainer.py with
    uld_token_merge_strategy=bayesian), but leaves out the end of an answer.

    The loss counts the last token of each chunk. teachers: see `distillation_loss`.
    """
    assert batch.teacher is not None and outputs.top_k is not None and outputs.logprobs is not None
    is_token = batch.teacher.tokens != NO_TOKEN
    chunks = torch.arange(len(is_token), device=is_token.device) if batch.chunks is None else batch.chunks  # None: no sequence
    earlier = earlier_logprobs(outputs.logprobs, batch.loss_mask, chunks)
    policy = torch.where(is_token, outputs.top_k.logprobs + earlier[:, None], -torch.inf)
    teacher, columns = batch.teacher.logprobs, policy.shape[1] // 2 if config.kl_type == "gold" else 0
    ranked = policy[:, columns:].exp().sort(-1, descending=True).values
    unmatched = (teacher[:, columns:].exp() - ranked).abs().sum(-1)
    metrics = {"unmatched_distance": unmatched}
    loss = unmatched
    if columns:
        p, q = teacher[:, :columns].clamp(min=LEAST), policy[:, :columns].clamp(min=LEAST)
        forward, reverse = p.exp() * (p - q), q.exp() * (q - p)
        divergence = config.mixed_kl_weight * forward + (1 - config.mixed_kl_weight) * reverse
        matched = torch.where(is_token[:, :columns], divergence, 0.0).sum(-1)
        loss = config.uld_hybrid_matched_weight * matched + config.uld_hybrid_unmatched_weight * unmatched
        metrics["matched_divergence"] = matched
    metrics = {name: value.detach() for name, value in metrics.items()}
    shares = {name: masked_share(value, batch, counts) for name, value in metrics.items()}
    for name, value in metrics.items():
        shares |= means_by_teacher(name, value, batch, teachers)
    return LossOutput(masked_share(loss, batch, counts), shares)
