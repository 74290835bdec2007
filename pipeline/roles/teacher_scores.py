"""Have each sample scored by its teacher."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.algorithms.universal_logits import LEAST, candidates
from pipeline.data.packing import pack_each
from pipeline.roles.regroup import regroup
from pipeline.train.train_backend import Phase, TrainBackend
from pipeline.types import Outputs, PackedBatch, Sample, TopK, Update


def ask_teachers(
    teachers: Mapping[str, TrainBackend],
    updates: Sequence[Update],
    batches: Sequence[list[PackedBatch]],
    top_k: int,
    phase: Phase,
) -> list[list[PackedBatch]]:
    """Return the training microbatches of each update with the outputs of each sample's teacher.

    teachers: "teacher NAME" -> its backend, or "teacher" -> the only one. top_k: number of tokens per position to return with
    their log-probs; 0: only the log-probs of the samples' own tokens. A teacher scores all its samples of the step in one call,
    so that an offloaded teacher is fetched once.
    """
    forward: list[list[list[int]]] = [[] for _ in updates]
    outputs: list[list[Outputs]] = [[] for _ in updates]
    for name, model in teachers.items():
        plans = [update.taught.get(name.removeprefix("teacher").strip(), []) or _shared_plan(update) for update in updates]
        read = [[_of_teacher(sample) for sample in update.samples] for update in updates]
        packed = [pack_each(samples, plan, model.device) for samples, plan in zip(read, plans, strict=True)]
        if not any(packed):
            continue
        with phase(f"forward of the {name}"):
            results = iter(model.forward(list(itertools.chain(*packed)), top_k=top_k))
        for i, plan in enumerate(plans):
            forward[i] += plan
            scored = zip(itertools.islice(results, len(plan)), plan, strict=True)
            outputs[i] += [_of_sample(out, [updates[i].samples[place] for place in members]) for out, members in scored]
    regrouped = map(regroup, outputs, forward, updates)
    return [
        [dataclasses.replace(batch, **_fields(out, top_k)) for batch, out in zip(microbatches, scored, strict=True)]
        for microbatches, scored in zip(batches, regrouped, strict=True)
    ]


def _of_teacher(sample: Sample) -> Sample:
    """Return the sample in its teacher's tokens. Only tokens of chunks have log-probs."""
    if sample.in_teacher is None:
        return sample
    zeros = np.zeros(len(sample.in_teacher.tokens), np.float32)
    return Sample(sample.in_teacher.tokens, sample.in_teacher.chunks >= 0, logprobs=zeros, advantages=zeros)


def _of_sample(outputs: Outputs, samples: Sequence[Sample]) -> Outputs:
    """Return a teacher's outputs for the samples' tokens, if they have others than the samples.

    Each token of a chunk has the log-prob of the whole chunk. The last has the teacher's most likely tokens, with the
    log-probs of the whole chunk with such a token at its end.
    """
    if all(sample.in_teacher is None for sample in samples):
        return outputs
    lengths = [len(sample.tokens_of_teacher) for sample in samples]
    parts = list(zip(*(tensor.split(lengths) for tensor in outputs.tensors()), strict=True))
    translated = [for_tokens_of(part, sample) for part, sample in zip(parts, samples, strict=True)]
    logprobs, *top_k = (torch.cat(tensors) for tensors in zip(*translated, strict=True))
    return dataclasses.replace(outputs, logprobs=logprobs, top_k=TopK(*top_k) if top_k else None)


def for_tokens_of(outputs: Sequence[torch.Tensor], sample: Sample) -> list[torch.Tensor]:
    """Return one sequence's log-probs, and its tokens and log-probs of the top k if there are any, for the sample's tokens."""
    if sample.in_teacher is None:
        return [*outputs]
    logprobs, *top_k = outputs
    chunks, of_sample = sample.in_teacher.chunks, sample.in_teacher.chunks_of_sample
    count = max(chunks.max(), of_sample.max()) + 2  # the last place is that of tokens outside chunks
    last = np.zeros(count, np.int64)
    last[chunks] = np.arange(len(chunks))  # the last of several
    is_last = np.zeros(len(chunks), np.bool_)
    is_last[last[chunks]] = True
    arrays = (chunks.astype(np.int64) % count, of_sample.astype(np.int64) % count, last, is_last)
    chunk, at, ends, ending = (torch.from_numpy(array).to(logprobs.device) for array in arrays)
    sums = logprobs.new_zeros(count).index_add(0, chunk, logprobs)
    if not top_k:
        return [sums[at]]
    earlier = logprobs.new_zeros(count).index_add(0, chunk, torch.where(ending, 0.0, logprobs.clamp(min=LEAST)))
    tokens, of_tokens = top_k
    return [sums[at], tokens[ends[at]], of_tokens[ends[at]] + earlier[at, None]]


def with_candidates(batch: PackedBatch, policy: Outputs, matched: Mapping[str, torch.Tensor]) -> PackedBatch:
    """Return a batch whose teachers' tokens, in their own ids, are replaced by the policy's tokens to compare.

    policy: its outputs with its most likely tokens. matched: by the teacher's name, see `candidates`; {} for kl_type=uld.
    """
    own = policy.top_k
    assert batch.teacher is not None and own is not None
    if not matched:
        return dataclasses.replace(batch, teacher=candidates(batch.teacher, own, None))
    parts, one = [], next(iter(matched.values()))  # for an empty microbatch, which has no teacher
    for place, name in enumerate(batch.teachers):
        rows = slice(int(batch.cu_seqlens[place]), int(batch.cu_seqlens[place + 1]))
        given, ours = (TopK(each.tokens[rows], each.logprobs[rows]) for each in (batch.teacher, own))
        parts.append(candidates(given, ours, matched.get(name, one)))
    tokens, logprobs = torch.cat([part.tokens for part in parts]), torch.cat([part.logprobs for part in parts])
    return dataclasses.replace(batch, teacher=TopK(tokens, logprobs))


def _shared_plan(update: Update) -> list[list[int]]:
    """Return the microbatches of an update if all its samples have the same teacher; [] if they have several teachers."""
    return [] if update.taught else update.forward


def _fields(outputs: Outputs, top_k: int) -> dict[str, Any]:
    return {"teacher": outputs.top_k} if top_k else {"teacher_logprobs": outputs.logprobs}
