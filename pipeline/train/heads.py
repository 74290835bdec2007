"""Heads of both backends: from hidden states of a LocalBatch to outputs of every token of the batch, in its order.

Under context parallelism each rank has a part of the rows. `GatherContextParallel` gathers the outputs, so all ranks that share
a batch compute the same loss.
"""

from __future__ import annotations

import torch

from pipeline.train.context_parallel import GatherContextParallel, LocalBatch
from pipeline.train.logprobs import LINEAR, HeadFunction, VocabularyShard, most_likely, target_outputs
from pipeline.train.truncation import Truncation
from pipeline.types import Outputs, TopK


def packed_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    batch: LocalBatch,
    temperature: float,
    chunk: int | None,
    shard: VocabularyShard | None = None,
    entropy: bool = False,
    top_k: int = 0,
    truncation: Truncation | None = None,
    function: HeadFunction = LINEAR,
) -> Outputs:
    """Return outputs of the whole batch. Entry t is of the distribution of token t, and 0 where a sequence begins.

    hidden [t, H]: of this context-parallel rank. weight [V, H], or this rank's rows of it. chunk None: all rows at once.
    top_k: number of most likely tokens in `Outputs.top_k`, without a graph; 0: the batch's candidates, if it has any. Both are
    of the distribution without truncation. function: of the head.
    """
    # The last row of a sequence predicts nothing. Computing these few rows is cheaper than gathering the others.
    tokens = None if top_k else batch.candidates
    outputs = target_outputs(hidden, weight, batch.targets, temperature, chunk, shard, entropy, tokens, truncation, function)
    chosen = outputs.candidates
    if top_k:
        tokens, chosen = most_likely(hidden, weight, top_k, temperature, chunk, shard, function)
    return Outputs(
        logprobs=_to_predicted_tokens(outputs.logprobs, batch),
        entropy=None if outputs.entropy is None else _to_predicted_tokens(outputs.entropy, batch),
        full_logprobs=None if outputs.full is None else _to_predicted_tokens(outputs.full, batch),
        top_k=None
        if tokens is None or chosen is None
        else TopK(_to_predicted_tokens(tokens, batch), _to_predicted_tokens(chosen, batch)),
    )


def packed_values(hidden: torch.Tensor, weight: torch.Tensor, batch: LocalBatch) -> Outputs:
    """Return the value after each token of the whole batch: hidden [t, H] of this context-parallel rank, weight [1, H].

    In float32 for any precision of the model: values are close together, and targets unrounded. Every tensor-parallel rank has
    the whole head and whole hidden states, so each computes the whole gradient.
    """
    return Outputs(values=_gather_context(hidden.float() @ weight[0].float(), batch)[batch.token_rows])


def _to_predicted_tokens(rows: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
    """Map predictions [t, ...] of this rank's rows to the predicted tokens [T, ...]; 0 where a sequence begins."""
    begins = batch.begins.view(-1, *[1] * (rows.dim() - 1))
    return _gather_context(rows, batch)[batch.predicting_rows].masked_fill(begins, 0)


def _gather_context(rows: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
    context = batch.packing.context
    return rows if context is None else GatherContextParallel.apply(rows, context.group)
