"""Heads of the last pipeline stage, which map hidden states to outputs of every token in the batch's order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from pipeline.config import PolicyConfig
from pipeline.train.context_parallel import LocalBatch
from pipeline.train.heads import packed_outputs, packed_values
from pipeline.train.logprobs import VocabularyShard
from pipeline.train.megatron.groups import tensor_group
from pipeline.train.megatron.model import PipelineStage
from pipeline.train.train_backend import ModelRole
from pipeline.train.truncation import Truncation
from pipeline.types import Outputs, PackedBatch, TopK


@dataclass(frozen=True)
class VocabularyHead:
    """The head for log-probs: the output layer, or the embedding if the output layer is tied to it."""

    vocabulary: int  # size without padding
    temperature: float
    chunk: int | None
    entropy: bool
    truncation: Truncation | None

    @classmethod
    def of(cls, policy: PolicyConfig, hf: PreTrainedConfig, role: ModelRole) -> VocabularyHead:
        """Return the head of a model with this role."""
        truncation = Truncation.of(policy.generation) if role.truncated else None
        return cls(hf.vocab_size, policy.generation.temperature, policy.logprob_chunk_size, role.entropy, truncation)

    def untruncated(self) -> VocabularyHead:
        """Return the same head without truncation."""
        return dataclasses.replace(self, truncation=None)

    def outputs(self, stage: PipelineStage, hidden: torch.Tensor, batch: LocalBatch, top_k: int) -> Outputs:
        """Return outputs of the whole batch from hidden [t, 1, H] of this context-parallel rank.

        top_k: number of most likely tokens in `Outputs.top_k`, without a graph; 0 for the batch's candidates, if it has any.
        """
        weight, shard = self._weight(stage)
        options = (self.temperature, self.chunk, shard, self.entropy, top_k, self.truncation)
        return packed_outputs(hidden[:, 0], weight, batch, *options)

    def empty(self, batch: PackedBatch, top_k: int) -> Outputs:
        """Return outputs of zeros, into which another stage receives the last stage's outputs."""
        tokens, columns = len(batch.tokens), top_k or (batch.teacher.tokens.size(1) if batch.teacher else 0)
        new = batch.generate_logprobs.new_zeros
        return Outputs(
            logprobs=new(tokens),
            entropy=new(tokens) if self.entropy else None,
            full_logprobs=new(tokens) if self.truncation else None,
            top_k=TopK(new(tokens, columns, dtype=torch.int64), new(tokens, columns)) if columns else None,
        )

    def _weight(self, stage: PipelineStage) -> tuple[torch.Tensor, VocabularyShard | None]:
        """Return (this rank's rows of the output layer, the shard of the vocabulary that they are; None: all of it)."""
        group = tensor_group()
        tied = stage.share_embeddings_and_output_weights
        weight = stage.shared_embedding_or_output_weight() if tied else stage.output_layer.weight
        assert weight is not None  # on the last stage
        start = group.rank() * len(weight)
        weight = weight[: max(self.vocabulary - start, 0)]  # without padding
        return weight, VocabularyShard(start, group) if group.size() > 1 else None


@dataclass(frozen=True)
class ValueHead:
    """The head for values: one value after each token."""

    def untruncated(self) -> ValueHead:
        """Return the head itself: values do not depend on sampling."""
        return self

    def outputs(self, stage: PipelineStage, hidden: torch.Tensor, batch: LocalBatch, top_k: int) -> Outputs:
        """Return the value after each token of the whole batch. Arguments: see `VocabularyHead.outputs`."""
        if top_k:
            raise ValueError("top_k: a model with a value head has no most likely tokens")
        return packed_values(hidden[:, 0], stage.value_head.weight, batch)

    def empty(self, batch: PackedBatch, top_k: int) -> Outputs:
        """Return outputs of zeros, into which another stage receives the last stage's outputs."""
        return Outputs(values=batch.generate_logprobs.new_zeros(len(batch.tokens)))


def broadcast_outputs(outputs: list[Outputs], stages: dist.ProcessGroup) -> None:
    """Copy the last pipeline stage's outputs to the other stages, one field of all batches at a time. Collective."""
    for tensors in zip(*(output.tensors() for output in outputs), strict=True):
        flat = torch.cat(tensors)
        dist.broadcast(flat, group_src=stages.size() - 1, group=stages)
        for tensor, part in zip(tensors, flat.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.copy_(part)
