"""Have each sample scored by its teacher."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.data.packing import pack_each
from pipeline.roles.regroup import regroup
from pipeline.train.train_backend import Phase, TrainBackend
from pipeline.types import Outputs, PackedBatch, Update


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
        packed = [pack_each(update.samples, plan, model.device) for update, plan in zip(updates, plans, strict=True)]
        if not any(packed):
            continue
        with phase(f"forward of the {name}"):
            results = iter(model.forward(list(itertools.chain(*packed)), top_k=top_k))
        for i, plan in enumerate(plans):
            forward[i] += plan
            outputs[i] += itertools.islice(results, len(plan))
    regrouped = map(regroup, outputs, forward, updates)
    return [
        [dataclasses.replace(batch, **_fields(out, top_k)) for batch, out in zip(microbatches, scored, strict=True)]
        for microbatches, scored in zip(batches, regrouped, strict=True)
    ]


def _shared_plan(update: Update) -> list[list[int]]:
    """Return the microbatches of an update if all its samples have the same teacher; [] if they have several teachers."""
    return [] if update.taught else update.forward


def _fields(outputs: Outputs, top_k: int) -> dict[str, Any]:
    return {"teacher": outputs.top_k} if top_k else {"teacher_logprobs": outputs.logprobs}
