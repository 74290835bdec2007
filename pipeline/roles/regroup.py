"""Regroup the outputs of a forward pass into the microbatches of training, which may be cut differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.types import Outputs, TopK, Update


def regroup(outputs: Sequence[Outputs], forward: Sequence[list[int]], update: Update) -> list[Outputs]:
    """Return one output for each microbatch of `update.train`, from one output for each microbatch of `forward`.

    Every sample is in `forward` once. An empty microbatch has one token that does not count; all its entries are 0.
    """
    of_sample: dict[int, list[torch.Tensor]] = {}
    for members, output in zip(forward, outputs, strict=True):
        if members:
            lengths = [len(update.samples[i].tokens) for i in members]
            parts = zip(*(tensor.split(lengths) for tensor in output.tensors()), strict=True)
            of_sample |= dict(zip(members, map(list, parts), strict=True))
    nothing = [torch.zeros_like(tensor[:1]) for tensor in outputs[0].tensors()]
    return [
        _replace(outputs[0], [torch.cat(parts) for parts in zip(*(of_sample[i] for i in members), strict=True)] or nothing)
        for members in update.train
    ]


def _replace(outputs: Outputs, tensors: list[torch.Tensor]) -> Outputs:
    """Return `outputs` with other tensors in place of `outputs.tensors()`."""
    stream = iter(tensors)
    names = ("logprobs", "entropy", "values", "full_logprobs")
    fields = {name: next(stream) for name in names if getattr(outputs, name) is not None}
    return Outputs(**fields, top_k=TopK(*stream) if outputs.top_k else None)
