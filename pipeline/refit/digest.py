"""Prove that both ends of a refit hold the same values, by 64-bit hashes; the hashes of any parts of a box add up to its hash.

The hash of a box is, modulo 2^64, the sum over its rows (all dimensions but the last) of w(row) * s(row). w(row) is a
pseudorandom odd number that depends on the row's place in the tensor on disk. s(row) is the sum of the row's 64-bit words, in
which entry j of a row is in lane j mod (8 / itemsize). In a tensor of one dimension every entry is a row of its own. So parts
of a box can be hashed in place, on any rank and in any order, and their hashes add up to the hash of the box.

One flipped bit always changes the hash, because an odd number times a power of two below 2^64 is not 0. Exchanged, stale or
missing rows change it except with a probability of the order of 2^-64.

Exchanging words within a row does not change the hash. The digest finds errors; it is no defence against an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pipeline.refit.protocol import RefitReport
from pipeline.refit.tables import RefitPlan, TransferItems

WORD_BYTES = 8  # bytes
_INTEGERS = {2: torch.int16, 4: torch.int32}
_NAMED = 5  # tensors that an error names
_RADIX = np.uint64(6364136223846793005)  # any large odd number: Knuth's multiplier for 64 bits


class RefitError(RuntimeError):
    """A refit failed, and the generate ranks' current weights must not be served."""


class Digest:
    """The hashes of one rank's items in a refit. Only items with a key and a region of this rank are hashed."""

    def __init__(self, items: TransferItems, dims: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device):
        """Prepare the row weights of all items.

        dims: number of dimensions of each item's tensor on disk. dtypes: dtype in which each item's values are hashed.
        """
        self.hashed = ((items.key >= 0) & (items.row >= 0)).tolist()
        self._dtypes = dtypes
        self._keys, self._key_index = np.unique(items.key[self.hashed], return_inverse=True)
        weights = [
            row_weights(items.offset[i, : dims[i]].tolist(), items.size[i, : dims[i]].tolist())
            for i in np.flatnonzero(self.hashed)
        ]
        rows = np.zeros(len(items), np.int64)
        rows[self.hashed] = [len(of_item) for of_item in weights]
        ends = np.cumsum(rows)
        self._last = torch.from_numpy(ends[self.hashed]).to(device)
        lanes = [WORD_BYTES // dtype.itemsize for dtype in dtypes]
        self._lanes = [int(items.offset[i, d - 1]) % lanes[i] if d > 1 else 0 for i, d in enumerate(dims)]
        all_weights = np.concatenate(weights) if weights else np.zeros(0, np.uint64)
        self._weights = torch.from_numpy(all_weights.view(np.int64)).to(device)
        self._sums = torch.zeros(len(all_weights), dtype=torch.int64, device=device)
        self._sums_of = self._sums.split(rows.tolist())

    def clear(self) -> None:
        """Reset all sums before a refit."""
        self._sums.zero_()

    def add(self, item: int, values: torch.Tensor) -> None:
        """Add the hash of an item to its sum. values: the item's values, in its shape on disk."""
        sum_rows(values.to(self._dtypes[item]), self._lanes[item], self._sums_of[item])

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (keys [k] int32, hashes [k] uint64)."""
        running = torch.cumsum(self._sums * self._weights, 0)  # differences are right modulo 2^64
        ends = torch.cat([running.new_zeros(1), running])[self._last]
        hashes = np.zeros(len(self._keys), np.uint64)
        np.add.at(hashes, self._key_index, np.diff(ends.cpu().numpy().view(np.uint64), prepend=np.uint64(0)))
        return self._keys, hashes


def row_weights(offset: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """Return w of every row of a box, [rows] uint64.

    w is splitmix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195) of the row's number, made odd. A row's
    indices in the leading dimensions are the digits of its number, to a base that does not depend on the tensor's shape.
    """
    leading = max(1, len(size) - 1)
    rows = np.zeros((), np.uint64)
    for start, count in zip(offset[:leading], size[:leading], strict=True):
        rows = rows[..., None] * _RADIX + np.arange(start, start + count, dtype=np.uint64)
    z = rows.ravel() + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def sum_rows(values: torch.Tensor, lane: int, out: torch.Tensor) -> None:
    """Write s of every row to `out`, [rows] int64, contiguous. lane: the lane of the first entry of each row."""
    lanes = WORD_BYTES // values.itemsize
    if values.ndim < 2:
        values = values.reshape(-1, 1)
    shape = values.shape[:-1]
    if lane == 0 and _whole_words(values, lanes):
        torch.sum(values.view(torch.int64), -1, out=out.view(shape))
        return
    width = 8 * values.itemsize
    bits = values.view(_INTEGERS[values.itemsize]).to(torch.int64) & ((1 << width) - 1)
    shifts = (torch.arange(values.shape[-1], device=values.device) + lane) % lanes * width
    torch.sum(bits << shifts, -1, out=out.view(shape))


def _whole_words(values: torch.Tensor, lanes: int) -> bool:
    """Return whether the rows can be read in place as 64-bit words."""
    if values.shape[-1] % lanes or values.storage_offset() % lanes:
        return False
    *strides, last = values.stride()
    return last == 1 and not any(stride % lanes for stride in strides)


def compare(
    plan: RefitPlan, names: Sequence[str], train: Mapping[int, RefitReport], generate: Mapping[int, RefitReport], version: int
) -> None:
    """Compare the digests in the reports of the train and generate ranks. Rank 0 calls this after a refit.

    names: of all tensors on disk. train, generate: global rank -> its report. version: the version of the new weights, which
    must not be served after a mismatch. Raises RefitError, naming the tensors and the generate ranks whose values differ from
    the values that were sent.
    """
    sent_hashes, sides = np.zeros(plan.keys, np.uint64), np.zeros((2, plan.keys), bool)
    for report in train.values():
        np.add.at(sent_hashes, report.keys, report.hashes)
        sides[0, report.keys] = True
    wrong: dict[int, np.ndarray] = {}
    for rank, report in generate.items():
        sides[1, report.keys] = True
        differ = (report.hashes != sent_hashes[report.keys]) | ~sides[0, report.keys]
        if differ.any():
            wrong[rank] = np.unique(plan.key_tensor[report.keys[differ]])
    unreported = np.unique(plan.key_tensor[~sides.all(axis=0)])
    if not wrong and not len(unreported):
        return
    tensors = np.unique(np.concatenate([unreported, *wrong.values()]))
    differences = [f"generate rank {rank} differs in {_list_names(names, of_rank)}" for rank, of_rank in sorted(wrong.items())]
    differences += [f"train ranks or generate ranks do not report {_list_names(names, unreported)}"] * bool(len(unreported))
    raise RefitError(
        f"digest of version {version}: {len(tensors)} of {len(np.unique(plan.key_tensor))} tensors did not arrive as they were"
        f" sent: {'; '.join(differences)}"
    )


def _list_names(names: Sequence[str], tensors: np.ndarray) -> str:
    first: list[int] = tensors[:_NAMED].tolist()
    text = ", ".join(names[tensor] for tensor in first)
    return text if len(tensors) <= _NAMED else f"{text} and {len(tensors) - _NAMED} more"
