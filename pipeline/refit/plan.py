"""Plan a refit, once per run on rank 0: which box goes from which train rank to which generate rank, in which round.

    schedule(train, generate, engines, ...)           the whole transfer, in a few columns (`schedule.py`)
    schedule(train, generate, engines, ...).plan()    the same transfer, as a list for each rank

The boxes that one engine needs are cut into pieces, each within one held and one needed box (`intersection.py`). Pieces with
the same holders, unit and receiver are joined into chunks. Engines form sharing groups, and every chunk is sent once to each
group. The senders are chosen such that all train ranks send nearly the same number of bytes (`balance.py`). Each stream of
chunks is spread evenly over the transfer, and rounds are filled in that order (`rounds.py`). The members of a group take turns
as head, which receives from the train ranks. In a round each head receives at most a bucket divided by the number of members,
so that the bytes that members pass on fit into a bucket too.

This module needs no torch and moves no data. Planning a trillion parameters on thousands of ranks takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config.cluster import NetworkConfig
from pipeline.models.precision import served_bytes
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.refit import balance, intersection, rounds
from pipeline.refit.schedule import Chunks, RefitSchedule
from pipeline.refit.tables import LayoutTable

_ROUNDS = 16  # at least, if the model is large enough, so that packing, sending and applying overlap
_LEAST_BUCKET = 1 << 20  # bytes; below this, a message's latency outweighs its bytes: 20 us at 50 GB/s
_LEAST_CHUNK = 1 << 12  # bytes
_CHUNKS_OF_BUCKET = 16  # chunks per round; with fewer, more of a round stays empty
_CHUNKS_OF_RANK = 128  # chunks per train rank; the loads differ by about one chunk
_GOLDEN = (5**0.5 - 1) / 2  # any number of its multiples, modulo 1, is spread evenly
KEY = "policy.generation.refit_cfg.bucket_bytes"


def schedule(
    train: Mapping[int, LayoutTable],
    generate: Mapping[int, LayoutTable],
    engines: Sequence[Sequence[int]],
    shapes: Mapping[str, tuple[int, ...]],
    itemsize: int,
    bucket_bytes: int,
    nodes: Mapping[int, str],
    network: NetworkConfig,
) -> RefitSchedule:
    """Return the schedule of a refit.

    train, generate: global rank -> its table. engines: the global ranks of each engine, in the engine's order. shapes: of all
    tensors on disk, in the tables' order. itemsize: bytes of an entry in the policy's precision. nodes: rank -> its node.

    Raises ValueError, naming tensor and ranks, if no train rank holds a part of a needed box, or if train ranks hold boxes that
    overlap without being equal. Raises ValueError if engines need different boxes, RecipeError if bucket_bytes is too small.
    """
    names = list(shapes)
    held, needed = intersection.held_boxes(train, names), intersection.needed_boxes(generate, engines)
    uncut = intersection.intersect(held, needed, names, engines[0])
    ranks = np.array(sorted(train))
    sets = [np.searchsorted(ranks, members) for members in held.sets]
    width = np.array([served_bytes(name, itemsize) for name in names])
    demand = _demand(held, needed, uncut, width)
    shares, load = balance.send_shares(sets, demand, len(ranks))
    send_bytes = load.max(initial=0.0)
    receive_bytes = np.bincount(needed.receiver, (needed.boxes.numel * width[needed.boxes.tensor])[needed.box]).max(initial=0)
    groups = balance.sharing_groups(engines, nodes, network, send_bytes, receive_bytes)
    members = [len(group) for group in groups]
    bucket, limit = _sizes(bucket_bytes, int(width.max()), send_bytes * len(groups), receive_bytes, max(members))
    pieces = intersection.split(uncut, limit // width[needed.boxes.tensor[uncut.needed_box]])
    chunks = _chunks(held, needed, pieces, limit, width)
    source = _sources(chunks, sets, shares, len(groups))
    # Every member of a group is head for an equal part of each receiver's chunks, at all times.
    turn = _turns(chunks.receiver)
    head = np.stack([turn * count for count in members], 1).astype(np.int16)
    refit = RefitSchedule(
        held=held,
        needed=needed,
        pieces=pieces,
        chunks=chunks,
        engines=np.array(engines, np.int32),
        groups=groups,
        width=width,
        bucket_bytes=bucket,
        lower_bound_bytes=max(receive_bytes, balance.lower_bound(sets, demand, load) * len(groups)),
        source=ranks[source].astype(np.int32),
        head=head,
        round=_rounds(chunks, source, head, members, bucket),
    )
    _check(refit)
    return refit


def _demand(
    held: intersection.HeldBoxes, needed: intersection.NeededBoxes, pieces: intersection.Pieces, width: np.ndarray
) -> np.ndarray:
    """Return the bytes that one engine receives from each holder set, [sets] float64."""
    receivers = np.bincount(needed.box, minlength=len(needed.boxes))  # number of an engine's rows that need each box
    size = pieces.numel * width[needed.boxes.tensor[pieces.needed_box]]
    return np.bincount(held.holders[pieces.held_box], size * receivers[pieces.needed_box], len(held.sets))


def _sizes(bucket_bytes: int, itemsize: int, send_bytes: float, receive_bytes: float, members: int) -> tuple[int, int]:
    """Return (bytes of a bucket, most bytes of a piece).

    send_bytes, receive_bytes: bytes of the busiest train rank and of the busiest generate rank.
    """
    bucket = min(bucket_bytes, max(int(max(send_bytes, receive_bytes)) // _ROUNDS, _LEAST_BUCKET))
    limit = min(bucket // (_CHUNKS_OF_BUCKET * members), max(int(send_bytes) // _CHUNKS_OF_RANK, _LEAST_CHUNK))
    limit = max(limit, itemsize)
    if bucket // members < 2 * limit:
        message = f"got {bucket_bytes}; expected at least {2 * itemsize * members} bytes"
        raise RecipeError(Problem(KEY, "too-small", message))
    return bucket, limit


def _chunks(
    held: intersection.HeldBoxes, needed: intersection.NeededBoxes, pieces: intersection.Pieces, limit: int, width: np.ndarray
) -> Chunks:
    """Return chunks of at most twice `limit` bytes, in the order of time. No piece is larger than `limit`."""
    row, piece = intersection.expand(pieces.start[needed.box], np.diff(pieces.start)[needed.box])
    order = intersection.lexicographic([needed.unit[row], held.holders[pieces.held_box[piece]], needed.receiver[row]])
    row, piece = row[order], piece[order]
    unit, receiver, holders = needed.unit[row], needed.receiver[row], held.holders[pieces.held_box[piece]]
    size = pieces.numel[piece] * width[needed.boxes.tensor[needed.box[row]]]

    # A bundle is all of one unit, holder set and receiver. Cut each between pieces into equal parts of at most `limit` bytes.
    begins = intersection.changes(unit, holders, receiver)
    bundle, first = np.cumsum(begins) - 1, np.flatnonzero(begins)
    total, end = np.add.reduceat(size, first), np.cumsum(size)
    middle = 2 * (end - (end - size)[first][bundle]) - size  # twice the middle
    parts = -(-total // limit)
    part = middle * parts[bundle] // (2 * total[bundle])
    streams = holders.astype(np.int64) * (int(needed.receiver.max(initial=0)) + 1) + receiver
    start, stop = rounds.timeline(unit[first], streams[first], total)

    first = np.flatnonzero(intersection.changes(bundle, part))
    count, chunk_bytes = np.diff(first, append=len(bundle)), np.add.reduceat(size, first)
    unit = unit[first]
    # Without `turn`, all bundles of one part would be sent in the middle of their unit's time.
    turn = _turns(np.zeros(len(total), np.int32))[bundle[first]]
    share = (part[first] + turn) / parts[bundle[first]]
    order = np.argsort(start[unit] + (stop - start)[unit] * share, kind="stable")
    first = first[order]
    return Chunks(
        unit=unit[order],
        receiver=receiver[first],
        holders=holders[first],
        stream=streams[first],
        bytes=chunk_bytes[order],
        first=first,
        count=count[order],
        row=row.astype(np.int32),
        piece=piece.astype(np.int32),
    )


def _sources(chunks: Chunks, sets: Sequence[np.ndarray], shares: Sequence[np.ndarray], groups: int) -> np.ndarray:
    """Return the index of the train rank that sends each chunk to each group, [chunks, groups].

    A holder set divides its bytes among its ranks like a queue that is cut into intervals:
    - The set's queue has all its chunks once for each group: group after group, in a group receiver after receiver.
    - Each rank of the set sends one interval of the queue, as long as its share. So a receiver has few sources.
    - A receiver's chunks are in an order in which every interval has chunks of all times. So its sources never pause.

    The queues of all sets lie one after the other on one line of bytes. A chunk belongs to the rank whose interval has the
    chunk's middle.
    """
    order = np.lexsort((_turns(chunks.stream), chunks.receiver, chunks.holders))
    holders, size = chunks.holders[order], chunks.bytes[order]
    set_bytes = np.bincount(holders, size, len(sets))  # [sets] for one group
    set_start = np.cumsum(set_bytes) - set_bytes  # [sets] for one group
    middle = np.empty(len(order))  # [chunks] from the start of the set, in the first group
    middle[order] = np.cumsum(size) - size / 2 - set_start[holders]
    rank_ends = [  # on the line, of the ranks of each set
        (start + np.cumsum(share) / share.sum() * total) * groups if total else np.full(len(share), start * groups)
        for start, total, share in zip(set_start, set_bytes, shares, strict=True)
    ]
    queue_start = (set_start * groups + 0.0)[chunks.holders, None]
    group_start = set_bytes[chunks.holders, None] * np.arange(groups)  # from the start of the queue
    position = queue_start + group_start + middle[:, None]  # on the line, [chunks, groups]
    member = np.searchsorted(np.concatenate(rank_ends), position, "right")  # index into all sets' ranks
    first_member = np.cumsum([0, *map(len, sets)])
    # Rounding may put a position at a queue's end into the next set.
    member = np.clip(member, first_member[chunks.holders, None], first_member[chunks.holders + 1, None] - 1)
    return np.concatenate(sets)[member]


def _turns(key: np.ndarray) -> np.ndarray:
    """Return [n] float64 in [0, 1), such that the values of all rows with the same key are spread evenly.

    The values of any regular part of these rows (such as every second row) are spread evenly too.
    """
    return rounds.running_within(key, np.ones(len(key), np.int64)) * _GOLDEN % 1


def _rounds(chunks: Chunks, source: np.ndarray, head: np.ndarray, members: Sequence[int], bucket: int) -> np.ndarray:
    """Return the round in which the source sends each chunk, [chunks, groups] int32."""
    receivers = int(chunks.receiver.max(initial=0)) + 1
    offset = np.cumsum([0, *members])
    target = (offset[:-1] + head) * receivers + chunks.receiver[:, None]
    room = np.repeat([bucket // count for count in members], np.array(members) * receivers)
    size = np.broadcast_to(chunks.bytes[:, None], source.shape).ravel()
    return rounds.assign(_short(source.ravel()), _short(target.ravel()), size, bucket, room).reshape(source.shape)


def _short(ranks: np.ndarray) -> np.ndarray:
    """Return the ranks as uint16 if they fit, because numpy sorts uint16 several times as fast."""
    return ranks.astype(np.uint16 if ranks.max(initial=0) < 1 << 16 else np.int32)


def _check(refit: RefitSchedule) -> None:
    for sums in refit.traffic():
        if sums.max(initial=0) > refit.bucket_bytes:
            raise AssertionError(f"a rank moves {sums.max()} bytes in a round, more than its bucket of {refit.bucket_bytes}")
