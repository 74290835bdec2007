"""Intersect the boxes that train ranks hold with the boxes that one engine needs, and cut the intersections into pieces.

All data are columns. Equal boxes of several ranks are handled once: the train ranks' tables become distinct boxes, each with
its holder set (the ranks that hold it), and an engine's tables become distinct boxes that one or more of its ranks need.
Intersections are cut into pieces of bounded size. A piece lies in one held and one needed box.

`balance.py` decides which rank sends, and `rounds.py` when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.refit.tables import LayoutTable

_PAIRS = 1 << 21  # candidate pairs per batch, to bound memory


@dataclass(frozen=True, slots=True)
class Boxes:
    """Distinct boxes, sorted by tensor, then offset, then size."""

    tensor: np.ndarray  # [n] int32
    offset: np.ndarray  # [n, D] int64
    size: np.ndarray  # [n, D] int64

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def numel(self) -> np.ndarray:
        """Entries of each box, [n] int64."""
        return self.size.prod(1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The non-empty rows of one rank's table, as distinct boxes."""

    row: np.ndarray  # [n] int32: row of the table
    box: np.ndarray  # [n] int32: index into Boxes


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """The boxes that the train ranks hold."""

    boxes: Boxes
    rows: dict[int, Rows]  # by global rank
    holders: np.ndarray  # [boxes] int32: the holder set of each
    sets: list[np.ndarray]  # the global ranks of each holder set, ascending


@dataclass(frozen=True, slots=True)
class NeededBoxes:
    """The boxes that an engine needs, a row for each pair (rank of the engine, box). All engines need the same boxes."""

    boxes: Boxes
    receiver: np.ndarray  # [n] int32: rank in the engine
    row: np.ndarray  # [n] int32: of that rank's table
    unit: np.ndarray  # [n] int32: of `units`
    box: np.ndarray  # [n] int32
    units: list[str]  # of all the engine's ranks, in the model's order
    rank_units: list[np.ndarray]  # for each rank of the engine, the units of its table, as indices into `units`


@dataclass(frozen=True, slots=True)
class Pieces:
    """Boxes of bounded size, ordered by needed box: needed box w has the pieces `start[w]` to `start[w + 1]`."""

    start: np.ndarray  # [wanted boxes + 1] int64
    needed_box: np.ndarray  # [n] int32
    held_box: np.ndarray  # [n] int32
    offset: np.ndarray  # [n, D] int64, in the tensor on disk
    size: np.ndarray  # [n, D] int64

    @property
    def numel(self) -> np.ndarray:
        """Entries of each piece, [n] int64."""
        return self.size.prod(1)


def held_boxes(train: Mapping[int, LayoutTable], names: Sequence[str]) -> HeldBoxes:
    """Return the distinct boxes of the train ranks.

    Raises ValueError, naming tensor and ranks, if boxes overlap without being equal.
    """
    boxes, rows = _distinct_boxes(train)
    _, box = _pairs(boxes, boxes)
    counts = np.bincount(box, minlength=len(boxes))
    if counts.max(initial=1) > 1:
        odd = int(counts.argmax())
        first, second = _overlapping(boxes, odd)
        raise ValueError(
            f"refit: train ranks hold boxes of '{names[boxes.tensor[odd]]}' that overlap without being equal:"
            f" {_show(boxes, first)} on ranks {_ranks(rows, first)}, {_show(boxes, second)} on ranks {_ranks(rows, second)}"
        )
    return HeldBoxes(boxes, rows, *_holder_sets(rows, len(boxes)))


def needed_boxes(generate: Mapping[int, LayoutTable], engines: Sequence[Sequence[int]]) -> NeededBoxes:
    """Return the distinct boxes of an engine. A box that a rank needs twice is two boxes: Gemma 4 has keys that are values too.

    Raises ValueError if two engines need different boxes, or no engine needs any box.
    """
    first = list(engines[0])
    for number, engine in enumerate(engines):
        if len(engine) != len(first):
            raise ValueError(f"refit: engine {number} has {len(engine)} ranks, engine 0 has {len(first)}")
        for member, rank in enumerate(engine):
            if not _equal(generate[rank], generate[first[member]]):
                raise ValueError(
                    f"refit: generate rank {rank}, rank {member} of engine {number}, needs other boxes than rank"
                    f" {first[member]} of engine 0; all engines must have the same layout"
                )
    tables = {member: generate[rank] for member, rank in enumerate(first)}
    boxes, rows = _distinct_boxes(tables, copies=True)
    if not len(boxes):
        raise ValueError("refit: no generate rank needs any box")
    units = list(dict.fromkeys(name for table in tables.values() for name in table.units))
    number = {name: i for i, name in enumerate(units)}
    rank_units = [np.array([number[name] for name in table.units], np.int32) for table in tables.values()]
    unit = [numbers[tables[member].unit[rows[member].row]] for member, numbers in enumerate(rank_units)]
    return NeededBoxes(
        boxes,
        receiver=np.repeat(np.arange(len(first), dtype=np.int32), [len(rows[member].row) for member in tables]),
        row=np.concatenate([rows[member].row for member in tables]),
        unit=np.concatenate(unit),
        box=np.concatenate([rows[member].box for member in tables]),
        units=units,
        rank_units=rank_units,
    )


def intersect(held: HeldBoxes, needed: NeededBoxes, names: Sequence[str], engine: Sequence[int]) -> Pieces:
    """Return the intersections of held and needed boxes, uncut. engine: global ranks of the first engine, for error messages.

    Raises ValueError, naming tensor and ranks, if no train rank holds a part of a needed box.
    """
    held_box, needed_box = _pairs(held.boxes, needed.boxes)
    offset = np.maximum(held.boxes.offset[held_box], needed.boxes.offset[needed_box])
    size = (
        np.minimum(
            held.boxes.offset[held_box] + held.boxes.size[held_box],
            needed.boxes.offset[needed_box] + needed.boxes.size[needed_box],
        )
        - offset
    )
    covered = np.bincount(needed_box, size.prod(1), len(needed.boxes)).astype(np.int64)
    if (covered != needed.boxes.numel).any():
        odd = int((covered != needed.boxes.numel).argmax())
        ranks = [engine[member] for member in np.unique(needed.receiver[needed.box == odd])]
        raise ValueError(
            f"refit: the train ranks hold {covered[odd]} of the {needed.boxes.numel[odd]} entries of '"
            f"{names[needed.boxes.tensor[odd]]}' {_show(needed.boxes, odd)}, which generate ranks {ranks} need"
        )
    return _pieces(needed_box, held_box, offset, size, len(needed.boxes))


def split(pieces: Pieces, limit: np.ndarray) -> Pieces:
    """Return the pieces cut into smaller pieces. limit: [n], most entries of a new piece, for each of `pieces`.

    Cuts are along the first dimension, so that rows stay whole, and along the next dimension only if one row is too large.
    """
    cell, offset, size = _split(pieces.offset, pieces.size, limit)
    return _pieces(pieces.needed_box[cell], pieces.held_box[cell], offset, size, len(pieces.start) - 1)


def _pieces(needed: np.ndarray, held: np.ndarray, offset: np.ndarray, size: np.ndarray, boxes: int) -> Pieces:
    start = np.concatenate([[0], np.cumsum(np.bincount(needed, minlength=boxes))])
    return Pieces(start, needed.astype(np.int32), held.astype(np.int32), offset, size)


# ---- distinct rows ------------------------------------------------------------------------------------------------------


def lexicographic(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the order that sorts rows of non-negative integer columns, the first column first; stable."""
    return np.lexsort(_keys(columns)[::-1])


def changes(*columns: np.ndarray) -> np.ndarray:
    """Return whether each row differs from the row before it, [n] bool; True for the first row."""
    differs = np.zeros(len(columns[0]), bool)
    differs[:1] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return differs


def expand(start: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs (i, number) with number in start[i] .. start[i] + count[i] - 1, as two columns, in the order of i."""
    index = np.repeat(np.arange(len(count)), count)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(count) - count - start, count)


def distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (first index of each distinct row, in sorted order; for each row, the number of its distinct row)."""
    keys = _keys(columns)
    order = np.lexsort(keys[::-1])
    new = changes(*(key[order] for key in keys))
    inverse = np.empty(len(order), np.int32)
    inverse[order] = np.cumsum(new) - 1
    return order[new], inverse


def _keys(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the columns packed into as few int64 columns as possible, which sort and compare like the given columns."""
    keys: list[np.ndarray] = []
    room = 1
    for column in columns:
        most = int(column.max(initial=0)) + 1
        if keys and room * most < 1 << 62:
            keys[-1] = keys[-1] * most + column
            room *= most
        else:
            keys.append(column.astype(np.int64))
            room = most
    return keys


def _distinct_boxes(tables: Mapping[int, LayoutTable], copies: bool = False) -> tuple[Boxes, dict[int, Rows]]:
    """Return the distinct boxes of all tables, and each rank's rows. Ranks may share a table object, which is read once.

    copies: whether equal boxes of one table are distinct.
    """
    shared = {id(table): table for table in tables.values()}
    full = {key: np.flatnonzero((table.size > 0).all(1)).astype(np.int32) for key, table in shared.items()}
    tensor = np.concatenate([table.tensor[full[key]] for key, table in shared.items()])
    offset = np.concatenate([table.offset[full[key]] for key, table in shared.items()])
    size = np.concatenate([table.size[full[key]] for key, table in shared.items()])
    stops = np.cumsum([len(rows) for rows in full.values()])
    columns = [tensor, *offset.T, *size.T]
    if copies:
        owner = np.repeat(np.arange(len(full)), [len(rows) for rows in full.values()])
        columns.append(_earlier(distinct([*columns, owner])[1]))
    first, inverse = distinct(columns)
    rows = {key: Rows(full[key], box) for key, box in zip(shared, np.split(inverse, stops[:-1]), strict=True)}
    return Boxes(tensor[first], offset[first], size[first]), {rank: rows[id(table)] for rank, table in tables.items()}


def _earlier(number: np.ndarray) -> np.ndarray:
    """Return how many earlier rows have the same number, for each row."""
    order, place = np.argsort(number, kind="stable"), np.arange(len(number))
    first = np.maximum.accumulate(np.where(changes(number[order]), place, 0))
    earlier = np.empty_like(place)
    earlier[order] = place - first
    return earlier


def _holder_sets(rows: Mapping[int, Rows], count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return (the holder set of each box; the ranks of each holder set).

    It refines a partition of the boxes: rank by rank, every class is split into boxes that the rank holds and boxes that it
    does not hold.
    """
    ranks: dict[int, list[int]] = {}  # ranks that share their rows, by the id of these
    for rank in sorted(rows):
        ranks.setdefault(id(rows[rank]), []).append(rank)
    boxes = {key: np.unique(rows[members[0]].box) for key, members in ranks.items()}
    label, fresh = np.zeros(count, np.int64), 1
    for members_boxes in boxes.values():
        old, inverse = np.unique(label[members_boxes], return_inverse=True)
        label[members_boxes] = fresh + inverse
        fresh += len(old)
    names, label = np.unique(label, return_inverse=True)
    members: list[list[int]] = [[] for _ in names]
    for key, members_boxes in boxes.items():
        for number in np.unique(label[members_boxes]):
            members[number] += ranks[key]
    return label.astype(np.int32), [np.array(sorted(ranks_of_set), np.int64) for ranks_of_set in members]


def _equal(a: LayoutTable, b: LayoutTable) -> bool:
    if a is b:
        return True
    columns_equal = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tensor", "offset", "size", "unit"))
    return columns_equal and a.units == b.units


# ---- intersections ------------------------------------------------------------------------------------------------------


def _pairs(left: Boxes, right: Boxes) -> tuple[np.ndarray, np.ndarray]:
    """Return the index pairs (i, j) for which box i of `left` and box j of `right` overlap, in the order of j, then i."""
    span = int(max((boxes.offset[:, 0] + boxes.size[:, 0]).max(initial=0) for boxes in (left, right))) + 1
    start = left.tensor * np.int64(span) + left.offset[:, 0]
    reach = np.maximum.accumulate(start + left.size[:, 0])  # running maximum of the ends, which ascends as starts do
    begin = right.tensor * np.int64(span) + right.offset[:, 0]
    low = np.searchsorted(reach, begin, "right")
    count = np.maximum(np.searchsorted(start, begin + right.size[:, 0], "left") - low, 0)
    total = np.cumsum(count)
    pairs = []
    at = 0
    while at < len(right):
        stop = max(at + 1, int(np.searchsorted(total, (total[at - 1] if at else 0) + _PAIRS, "right")))
        j, i = expand(low[at:stop], count[at:stop])
        j += at
        overlap = np.minimum(left.offset[i] + left.size[i], right.offset[j] + right.size[j]) > np.maximum(
            left.offset[i], right.offset[j]
        )
        keep = overlap.all(1)
        pairs.append((i[keep], j[keep]))
        at = stop
    if not pairs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate([i for i, _ in pairs]), np.concatenate([j for _, j in pairs])


def _split(offset: np.ndarray, size: np.ndarray, limit: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (the box that each piece belongs to, its offset, its size)."""
    source = np.arange(len(offset))
    for dim in range(offset.shape[1]):
        inner = size[:, dim + 1 :].prod(1)
        parts = np.where(size[:, dim] * inner > limit, -(-size[:, dim] // np.maximum(limit // inner, 1)), 1)
        if parts.max(initial=1) == 1:
            continue
        box, part = expand(np.zeros_like(parts), parts)
        extent = size[box, dim]
        start, stop = part * extent // parts[box], (part + 1) * extent // parts[box]
        source, offset, size, limit = source[box], offset[box], size[box], limit[box]
        offset[:, dim] += start
        size[:, dim] = stop - start
    return source, offset, size


# ---- messages -----------------------------------------------------------------------------------------------------------


def _show(boxes: Boxes, i: int) -> str:
    return f"[{', '.join(f'{o}:{o + s}' for o, s in zip(boxes.offset[i].tolist(), boxes.size[i].tolist(), strict=True))}]"


def _ranks(rows: Mapping[int, Rows], box: int) -> list[int]:
    return [rank for rank, held_rows in sorted(rows.items()) if (held_rows.box == box).any()]


def _overlapping(boxes: Boxes, odd: int) -> tuple[int, int]:
    first, second = _pairs(boxes, boxes)
    overlapping = first[(second == odd) & (first != odd)]
    return odd, int(overlapping[0])
