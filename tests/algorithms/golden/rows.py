"""Convert peers' padded rows to our packed batches. Everything is float64, and gradients arrive in the rows."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from pipeline.types import GlobalCounts, PackedBatch


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Rows:
    """`[B, S]` inputs of which row i has `lengths[i]` tokens."""

    def __init__(self, inputs: dict[str, Any]):
        self.inputs = inputs
        self.lengths = tuple(inputs["lengths"])
        self.mask = tensor(inputs["token_mask"]).bool()
        if "sample_mask" in inputs:
            self.mask &= tensor(inputs["sample_mask"]).bool()[:, None]

    def tensor(self, name: str) -> torch.Tensor:
        return tensor(self.inputs[name])

    def leaf(self, name: str) -> torch.Tensor:
        return self.tensor(name).requires_grad_()

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """Pack `[B, S, ...]` to `[T, ...]`."""
        return torch.cat([row[:length] for row, length in zip(rows, self.lengths, strict=True)])

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Pad `[T]` to `[B, S]`."""
        rows = values.split(self.lengths)
        return torch.stack([torch.cat([row, row.new_zeros(self.mask.shape[1] - len(row))]) for row in rows])

    @property
    def counts(self) -> GlobalCounts:
        return GlobalCounts(int(self.mask.sum()), int(self.mask.any(1).sum()))

    def batch(self, **fields: Any) -> PackedBatch:
        """Return a batch. fields: of a `PackedBatch`; tensors of rows `[B, S]` are packed."""
        total = sum(self.lengths)
        zeros = torch.zeros(total, dtype=torch.float64)
        given = {
            name: self.packed(value) if isinstance(value, torch.Tensor) and value.shape == self.mask.shape else value
            for name, value in fields.items()
        }
        values = {
            "tokens": torch.zeros(total, dtype=torch.int64),
            "positions": torch.cat([torch.arange(length) for length in self.lengths]),
            "cu_seqlens": torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32),
            "lengths": self.lengths,
            "loss_mask": self.packed(self.mask),
            "generate_logprobs": zeros,
            "advantages": zeros,
            "rewards": torch.zeros(len(self.lengths), dtype=torch.float64),
        }
        return PackedBatch(**(values | given))


def before(rows: torch.Tensor) -> torch.Tensor:
    """Shift `[B, S, ...]` of what follows each token to what precedes it; the first column is 0."""
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[:, :-1]], 1)


def after(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `before`; the last column is 0."""
    return torch.cat([rows[:, 1:], torch.zeros_like(rows[:, :1])], 1)
