"""Have each sample scored by its teacher."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.data.packing import pack_each
from pipeline.roles.regroup import regroup
from pipeline.train.train_backend import Phase, TrainBackend
from pipeline.types import Outputs, PackedBatch, Sample, Update


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
    """Return a teacher's outputs for the samples' tokens: each token of a chunk has the log-prob of the whole chunk."""
    if all(sample.in_teacher is None for sample in samples):
        return outputs
    assert outputs.logprobs is not None
    parts = []
    for logprobs, sample in zip(outputs.logprobs.split([len(one.tokens_of_teacher) for one in samples]), samples, strict=True):
        if sample.in_teacher is None:
            parts.append(logprobs)
            continue
        chunks, of_sample = (
            torch.from_numpy(numbers.astype(np.int64)).to(logprobs.device)
            for numbers in (sample.in_teacher.chunks, sample.in_teacher.chunks_of_sample)
        )
        sums = logprobs.new_zeros(int(sample.in_teacher.chunks.max()) + 2)  # the last of those outside chunks
        sums = sums.index_add(0, torch.where(chunks < 0, len(sums) - 1, chunks), logprobs)
        parts.append(torch.where(of_sample < 0, 0.0, sums[of_sample]))
    return dataclasses.replace(outputs, logprobs=torch.cat(parts))


def _shared_plan(update: Update) -> list[list[int]]:
    """Return the microbatches of an update if all its samples have the same teacher; [] if they have several teachers."""
    return [] if update.taught else update.forward


def _fields(outputs: Outputs, top_k: int) -> dict[str, Any]:
    return {"teacher": outputs.top_k} if top_k else {"teacher_logprobs": outputs.logprobs}
