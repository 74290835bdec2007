"""Assign each chunk to a round, such that all ranks are busy and no rank sends or receives more than its bucket in a round.

`timeline` gives each unit an interval of the time from 0 to 1. A stream is all chunks that one holder set sends to one
receiver. Each stream is spread evenly over the time, with its units in the model's order. So all pipeline stages of either side
are busy at once, and a unit is complete soon after it begins. `assign` then fills rounds in that order.
"""

from __future__ import annotations

import numpy as np

from pipeline.refit.intersection import changes, lexicographic

_LOOK_AHEAD = 4  # rounds' worth of messages that may overtake one that waits for a full rank


def timeline(unit: np.ndarray, stream: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (begin, end) of each unit, [units] float64 each. Both are means over the unit's streams, weighted by their bytes.

    unit, stream, size: columns with a row for each chunk, with units in the model's order; size in bytes.
    """
    order = lexicographic([stream, unit])
    unit, size, begins = unit[order], size[order], changes(stream[order])
    first, index = np.flatnonzero(begins), np.cumsum(begins) - 1
    running, total = np.cumsum(size), np.add.reduceat(size, first)
    end = (running - (running - size)[first][index]) / total[index]
    begin = end - size / total[index]
    weight = np.bincount(unit, size)
    with np.errstate(invalid="ignore"):  # units without messages
        return np.bincount(unit, size * begin) / weight, np.bincount(unit, size * end) / weight


def running_within(key: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the running sum of `size` within each key, [n] int64: a row's value includes the row itself."""
    order = np.argsort(key, kind="stable")
    total = np.cumsum(size[order])
    total -= np.maximum.accumulate(np.where(changes(key[order]), total - size[order], 0))
    out = np.empty(len(key), np.int64)
    out[order] = total
    return out


def assign(source: np.ndarray, target: np.ndarray, size: np.ndarray, bucket: int, room: np.ndarray) -> np.ndarray:
    """Return the round of each message, [n] int32.

    source, target: [n] uint16 or wider. size: [n] bytes. Messages are in the order of time. In a round no source sends more
    than `bucket` bytes and no target receives more than `room[target]` bytes. A message waits while its source or its target is
    full; a limited number of later messages may overtake it. No message is larger than `bucket` or than its target's room, so
    the first waiting message always fits into the next round.
    """
    rounds = np.empty(len(size), np.int32)
    busiest = max(
        np.bincount(source, size).max(initial=0) / bucket, (np.bincount(target, size, len(room)) / room).max(initial=0)
    )
    window = int(_LOOK_AHEAD * len(size) / max(busiest, 1.0)) + 64
    pending = np.zeros(0, np.int64)
    at = number = 0
    while at < len(size) or len(pending):
        more = max(0, min(window - len(pending), len(size) - at))
        pending = np.concatenate([pending, np.arange(at, at + more)])
        at += more
        ends, to, count = source[pending], target[pending], size[pending]
        fits = (running_within(ends, count) <= bucket) & (running_within(to, count) <= room[to])
        rounds[pending[fits]] = number
        pending = pending[~fits]
        number += 1
    return rounds
