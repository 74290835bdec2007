"""Compute the prompt that several answers of a microbatch share only once.

The answers to one prompt, and the two answers of a pair, begin with the same tokens. Under causal attention their hidden states
are the same too, so the rows of the prompt are kept in the first of these sequences only. The queries of the other answers see
the keys of these rows and their own. Losses, log-probs and gradients stay the same up to rounding: the gradients of a shared
row are the sum of those of its copies.

Only attention may mix the tokens of a sequence. Not supported: context and sequence parallelism, dropout of adapters, whose
answers would share one mask, Megatron-Core.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from pipeline.train.context_parallel import HeadRows, LocalBatch
from pipeline.train.sequence_bounds import Packing, Spans, to_device
from pipeline.types import PackedBatch

LEAST_TOKENS, LEAST_SHARE = 512, 0.1
"""Fewer saved tokens, or a smaller share of the batch, are not worth the gathering of keys."""


def saved_tokens(batch: PackedBatch) -> int:
    """Return how many tokens of a batch need not be computed, because an earlier sequence has them; 0 if they are too few."""
    saved = sum(length for number, (first, length) in enumerate(batch.prompts) if first != number)
    return saved if batch.wanted is not None and saved >= max(LEAST_TOKENS, LEAST_SHARE * sum(batch.lengths)) else 0


def share(batch: PackedBatch) -> LocalBatch:
    """Return a batch in which answers share the rows of their prompts. It must know its prompts and wanted tokens."""
    assert batch.wanted is not None and len(batch.prompts) == len(batch.lengths)
    device, row_of, spans, keys, kept = batch.tokens.device, [], [], [], []
    starts = list(itertools.accumulate(batch.lengths, initial=0))
    rows = 0  # so far
    for number, (length, (first, prompt)) in enumerate(zip(batch.lengths, batch.prompts, strict=True)):
        shared = prompt if first != number else 0
        own = torch.arange(rows, rows + length - shared)
        sequence = torch.cat([row_of[first][:shared], own]) if shared else own
        row_of.append(sequence)
        keys.append(sequence)
        spans.append((length - shared, length))
        kept.append(torch.arange(starts[number] + shared, starts[number + 1]))
        rows += length - shared
    places = torch.from_numpy(batch.wanted.nonzero()[0])
    places = places if len(places) else torch.zeros(1, dtype=torch.int64)
    token_rows = torch.cat(row_of)
    predicting = token_rows[(places - 1).clamp(min=0)]
    on_device, row_of_token, rows_of_head, places_of_head = (
        to_device(tensor, device) for tensor in (torch.cat(kept), token_rows, predicting, places)
    )
    packing = replace(Packing.of(batch), shared=Spans(tuple(spans), *Spans.tensors(spans, keys, device)))
    return LocalBatch(
        tokens=batch.tokens[on_device][None],
        positions=batch.positions[on_device][None],
        targets=batch.tokens[places_of_head],
        candidates=None if batch.teacher is None else batch.teacher.tokens[places_of_head].clamp(min=0),
        packing=packing,
        token_rows=row_of_token,
        predicting_rows=to_device(torch.arange(len(token_rows)), device),
        begins=batch.positions == 0,
        head=HeadRows(rows_of_head, places_of_head, len(token_rows)),
    )
