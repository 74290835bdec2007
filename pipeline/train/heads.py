"""The heads of both backends, which map a rank's hidden states to outputs of every token of the batch, in the batch's order.

Under context parallelism each rank has a part of the rows. `GatherContextParallel` gathers the outputs, so all ranks that share
a batch compute the same loss.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from pipeline.config import PolicyConfig
from pipeline.train.context_parallel import GatherContextParallel, LocalBatch
from pipeline.train.logprobs import LINEAR, HeadFunction, Truncation, VocabularyShard, most_likely, target_outputs
from pipeline.train.train_backend import ModelRole
from pipeline.types import Outputs, PackedBatch, TopK


@dataclass(frozen=True)
class OutputHead:
    """The head of a model, which computes the outputs that the model's role needs."""

    role: ModelRole
    temperature: float
    chunk: int | None
    truncation: Truncation | None
    function: HeadFunction = LINEAR

    @classmethod
    def of(cls, policy: PolicyConfig, role: ModelRole, function: HeadFunction = LINEAR) -> OutputHead:
        """Return the head of a model with this role. function: see `packed_outputs`."""
        truncation = Truncation.of(policy.generation) if role.truncated else None
        return cls(role, policy.generation.temperature, policy.logprob_chunk_size, truncation, function)

    def untruncated(self) -> OutputHead:
        """Return the same head without truncation."""
        return dataclasses.replace(self, truncation=None)

    def check(self, model: str, top_k: int) -> None:
        """Raise ValueError for arguments of `TrainBackend.forward` that a model with this head does not take."""
        if model not in ("policy", "reference"):
            raise ValueError(f"model '{model}' is not one of: policy, reference")
        if top_k and self.role.head == "values":
            raise ValueError(f"top_k: got {top_k} for a model with a value head, which does not predict tokens; expected 0")

    def outputs(
        self, hidden: torch.Tensor, weight: torch.Tensor, batch: LocalBatch, shard: VocabularyShard | None, top_k: int
    ) -> Outputs:
        """Return outputs of the whole batch. Arguments: see `packed_outputs` and `packed_values`."""
        if self.role.head == "values":
            return packed_values(hidden, weight, batch)
        options = (self.temperature, self.chunk, shard, self.role.entropy, top_k, self.truncation, self.function)
        return packed_outputs(hidden, weight, batch, *options)

    def empty(self, batch: PackedBatch, top_k: int) -> Outputs:
        """Return outputs of zeros, into which a pipeline stage without the head receives its outputs."""
        tokens, columns = len(batch.tokens), top_k or (batch.teacher.tokens.size(1) if batch.teacher else 0)
        new = batch.generate_logprobs.new_zeros
        if self.role.head == "values":
            return Outputs(values=new(tokens))
        return Outputs(
            logprobs=new(tokens),
            entropy=new(tokens) if self.role.entropy else None,
            full_logprobs=new(tokens) if self.truncation else None,
            top_k=TopK(new(tokens, columns, dtype=torch.int64), new(tokens, columns)) if columns else None,
        )


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
    """Return outputs of the whole batch. Entry t belongs to the distribution of token t.

    It is 0 where a sequence begins, and for tokens whose outputs no loss reads (`PackedBatch.wanted`). hidden [t, H]: this
    context-parallel rank's hidden states. weight [V, H], or this rank's rows of it. chunk: the number of
    rows whose logits exist at once; None: all rows. top_k: the number of most likely tokens in `Outputs.top_k`, without a
    graph; 0: `Outputs.top_k` has the batch's candidates, if there are any. Both are of the distribution without truncation.
    function: the head's function.
    """
    if batch.head is not None:
        hidden = hidden.index_select(0, batch.head.rows)
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
    """Return the predictions of all ranks in the order of the predicted tokens, [T, ...], with 0 where there is none.

    rows [p, ...]: this rank's predictions.
    """
    if (head := batch.head) is not None:
        rows = rows.new_zeros(head.count, *rows.shape[1:]).index_copy(0, head.places, rows)
    begins = batch.begins.view(-1, *[1] * (rows.dim() - 1))
    return _gather_context(rows, batch)[batch.predicting_rows].masked_fill(begins, 0)


def _gather_context(rows: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
    context = batch.packing.context
    return rows if context is None else GatherContextParallel.apply(rows, context.group)
