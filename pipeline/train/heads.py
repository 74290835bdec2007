"""The heads of both backends, which map a rank's hidden states to outputs of every token of the batch, in the batch's order.

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
    """Return outputs of the whole batch. Entry t belongs to the distribution of token t; it is 0 where a sequence begins.

    hidden [t, H]: this context-parallel rank's hidden states. weight [V, H], or this rank's rows of it. chunk: the number of
    rows whose logits exist at once; None: all rows. top_k: the number of most likely tokens in `Outputs.top_k`, without a
    graph; 0: `Outputs.top_k` has the batch's candidates, if there are any. Both are of the distribution without truncation.
    function: the head's function.
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

    The product is in float32 whatever the model's precision, because values are close together and their targets are not
    rounded. Every tensor-parallel rank has the whole head and whole hidden states, so each computes the whole gradient.
    """
    return Outputs(values=_gather_context(hidden.float() @ weight[0].float(), batch)[batch.token_rows])


def _to_predicted_tokens(rows: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
    """Return the predictions of all ranks in the order of the predicted tokens, [T, ...], with 0 where a sequence begins.

    rows [t, ...]: the predictions of this rank's rows.
    """
    begins = batch.begins.view(-1, *[1] * (rows.dim() - 1))
    return _gather_context(rows, batch)[batch.predicting_rows].masked_fill(begins, 0)


def _gather_context(rows: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
    context = batch.packing.context
    return rows if context is None else GatherContextParallel.apply(rows, context.group)
