"""Send only the entries of each item that changed since the last refit, without loss: their positions and new values.

In bf16 an RL step often changes 1 to 5% of the values. Each item is sent in the form with the fewest bytes: in full, as a
bitmap and values, or as gaps of 8 or 16 bits and values. If a gap is too large for its bits, entries that did not change are
sent in between.

    bitmap     one bit an entry, lowest bit first; padded to 8 bytes; the values that changed
    gaps       entries skipped before each value; padded to 8 bytes; the values

The base of an item is its values after the last refit. A train rank keeps a copy of the values that it sent. Ranks that relay
need no copy, since they forward the messages that they receive. A receiver's base is the engine's own tensor if the engine is
written in place, and a copy otherwise. An int64 header precedes each message: the number of this refit, the number of the refit
that is its base (0: no base, so all items are in full), and a code for each item. After a failed refit a rank has no base: as a
sender it then sends all items in full, and as a receiver it refuses items that need a base.

The base has no digest of its own. The refit's digest covers entries that are not sent, because it reads back all entries.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from pipeline.refit.digest import WORD_BYTES, RefitError
from pipeline.refit.endpoints import Message, ReceiveEndpoint, SendEndpoint, padded_size
from pipeline.refit.transfer import Encoding, PeerChannel, PeerTensors, PendingMessages, StageTimer

FULL, BITMAP, GAPS8, GAPS16 = range(4)
_MODES = 4
_GAP = {GAPS8: torch.uint8, GAPS16: torch.int16}
_GAP_BITS = {GAPS8: 8, GAPS16: 16}
_INTEGERS = {2: torch.int16, 4: torch.int32}
_BITS = 0x0102040810204080  # multiplied by eight bytes of 0 or 1, lowest first, it gathers their bits in the highest byte


# ---- one item ---------------------------------------------------------------------------------------------------------


def encode(new: torch.Tensor, base: torch.Tensor | None, out: torch.Tensor) -> int:
    """Write the change from `base` to `new`, both [n], to the beginning of `out`, and return its code.

    base: None to send all entries. out: uint8 of at least n entries, padded.
    """
    count = new.numel()
    if base is not None:
        positions = changed_positions(new, base)
        if len(positions) < count // 8:
            mode, positions = _bridge_gaps(positions, new.itemsize)
            packed = torch.diff(positions, prepend=positions.new_full((1,), -1)).sub_(1).to(_GAP[mode])  # int16 wraps
        else:
            mode, packed = BITMAP, _bitmap(positions, count)
        code = len(positions) * _MODES + mode
        if encoded_bytes(code, count, new.itemsize) < padded_size(new.nbytes):
            out[: packed.nbytes].view(packed.dtype).copy_(packed)
            start = padded_size(packed.nbytes)
            torch.index_select(new, 0, positions, out=out[start : start + len(positions) * new.itemsize].view(new.dtype))
            return code
    out[: new.nbytes].view(new.dtype).copy_(new)
    return count * _MODES + FULL


def encoded_bytes(code: int, count: int, itemsize: int) -> int:
    """Return the number of bytes of an encoded item of `count` entries. Raises RefitError for an invalid `code`."""
    entries, mode = divmod(code, _MODES)
    if not 0 <= entries <= count or (mode == FULL and entries != count):
        raise RefitError(f"delta: a message announces {entries} of {count} entries")
    position_bytes = {FULL: 0, BITMAP: -(-count // 8), GAPS8: entries, GAPS16: 2 * entries}[mode]
    return padded_size(position_bytes) + padded_size(entries * itemsize)


def decode(body: torch.Tensor, code: int, count: int, precision: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (positions [k] int64, or None for all entries; values [k]).

    Raises RefitError if the positions do not fit the item.
    """
    entries, mode = divmod(code, _MODES)
    start = len(body) - padded_size(entries * precision.itemsize)
    values = body[start : start + entries * precision.itemsize].view(precision)
    if mode == FULL:
        return None, values
    if mode == BITMAP:
        bits = body[: -(-count // 8), None] >> torch.arange(8, dtype=torch.uint8, device=body.device) & 1
        positions = bits.view(-1).nonzero().view(-1)
    else:
        width = _GAP[mode].itemsize
        gaps = body[: entries * width].view(_GAP[mode]).to(torch.int64) & ((1 << 8 * width) - 1)
        positions = gaps.add_(1).cumsum(0).sub_(1)
    if len(positions) != entries or (entries and int(positions[-1]) >= count):
        raise RefitError(f"delta: got a message of {entries} entries; expected as many positions, below {count}")
    return positions, values


def changed_positions(new: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the positions whose bits differ, ascending, [k] int64. new, base: [n]."""
    lanes = WORD_BYTES // new.itemsize
    kind = _INTEGERS[new.itemsize]
    new, base = new.view(kind), base.view(kind)
    end = len(new) - len(new) % lanes
    words = new[:end].view(torch.int64) ^ base[:end].view(torch.int64)
    differ = words.nonzero().view(-1)
    if 2 * len(differ) > len(words):  # comparing every entry is cheaper than gathering that many words
        return (new != base).nonzero().view(-1)
    row, lane = words[differ].view(kind).view(-1, lanes).nonzero().unbind(1)
    tail = (new[end:] != base[end:]).nonzero().view(-1) + end
    return torch.cat([differ[row] * lanes + lane, tail])


def _bridge_gaps(positions: torch.Tensor, itemsize: int) -> tuple[int, torch.Tensor]:
    """Return (code, positions): GAPS8 or GAPS16, whichever takes fewer bytes, with positions added so that every gap fits."""
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    bridges = {mode: int((gaps >> bits).sum()) for mode, bits in _GAP_BITS.items()}
    mode = min(bridges, key=lambda mode: (len(positions) + bridges[mode]) * (_GAP[mode].itemsize + itemsize))
    if not bridges[mode]:
        return mode, positions
    bits = _GAP_BITS[mode]
    steps = (gaps >> bits) + 1
    index = torch.repeat_interleave(torch.arange(len(positions), device=positions.device), steps)
    nth = torch.arange(len(index), device=positions.device) - (steps.cumsum(0) - steps)[index] + 1
    return mode, torch.minimum((positions - gaps - 1)[index] + (nth << bits), positions[index])


def _bitmap(positions: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bitmap of the positions, [ceil(count / 8)] uint8."""
    mask = torch.zeros(padded_size(count), dtype=torch.uint8, device=positions.device)
    mask[positions] = 1
    return ((mask.view(torch.int64) * _BITS) >> 56).to(torch.uint8)


def scatter(view: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at positions of the flattened view, which may have any strides."""
    if not view.is_contiguous():
        remainders, positions = positions, torch.zeros_like(positions)
        for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
            positions += remainders % size * stride
            remainders = remainders // size
    span = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    view.as_strided((span,), (1,)).index_copy_(0, positions, values.to(view.dtype))


# ---- all of them ------------------------------------------------------------------------------------------------------


class DeltaBases:
    """The values that a rank keeps from one refit to the next. Empty until `done`."""

    def __init__(self):
        self.refit = 0  # number of the current refit
        self.base = 0  # number of the refit whose values are kept
        self.sent: torch.Tensor | None = None  # uint8: the items in the order of the sends
        self.received: dict[int, torch.Tensor] = {}  # by item, if the engine does not write in place

    def begin(self) -> int:
        """Begin a refit, and return the number of its base. No base remains if this refit fails."""
        base, self.base = self.base, 0
        self.refit += 1
        return base

    def done(self) -> None:
        """Make this refit the base of the next."""
        self.base = self.refit


class DeltaEncoding(Encoding):
    """The Encoding of changed entries."""

    def __init__(
        self, channel: PeerChannel, sends: SendEndpoint, receives: ReceiveEndpoint, bases: DeltaBases, timer: StageTimer
    ):
        self._channel, self._sends, self._receives, self._bases, self._timer = channel, sends, receives, bases, timer
        self._base = bases.begin()
        self._outgoing: PeerTensors = []
        self._codes: dict[int, int] = {}  # by received item
        self._bodies: dict[int, torch.Tensor] = {}
        self._headers: list[torch.Tensor] = []  # of incoming messages
        self._announced: PendingMessages  # headers in transfer
        if not sends.relays:
            self._starts = [0]
            for size in sends.sizes:
                self._starts.append(self._starts[-1] + padded_size(size))
            if bases.sent is None:
                bases.sent = torch.empty(self._starts[-1], dtype=torch.uint8, device=self._channel.device)
            self._scratch = torch.empty(max(sends.sizes, default=0), dtype=torch.uint8, device=self._channel.device)

    @override
    def pack(self, round: int) -> None:
        out: PeerTensors = []
        self._outgoing = []
        for message in self._sends.messages[round]:
            if self._sends.relays:
                codes = [self._codes[self._sends.sources[item]] for item in message.items]
            else:
                codes = self._encode(message, round)
            header = torch.tensor([self._bases.refit, self._base, *codes], device=self._channel.device)
            out.append((message.peer, header.view(torch.uint8)))
        into = self._receives.messages[round]
        self._headers = [
            torch.zeros(2 + len(message.items), dtype=torch.int64, device=self._channel.device) for message in into
        ]
        mail = [(message.peer, header.view(torch.uint8)) for message, header in zip(into, self._headers, strict=True)]
        self._announced = self._channel.post(out, mail)
        self._timer.lap("wire")

    def _encode(self, message: Message, round: int) -> list[int]:
        """Encode a message's items into contiguous staging memory, and return their codes."""
        room, at, codes = self._sends.room(message, round), 0, []
        for item in message.items:
            view, size, dtype = self._sends.view(item), self._sends.sizes[item], self._sends.dtypes[item]
            if not self._sends.in_one_piece(item, view) or view.storage_offset() * dtype.itemsize % WORD_BYTES:
                view = self._scratch[:size].view(dtype).view(view.shape).copy_(view)
            self._timer.lap("pack")
            self._sends.hash(item, view)
            self._timer.lap("digest")
            new = view.view(-1)
            assert self._bases.sent is not None  # only relays have none
            base = self._bases.sent[self._starts[item] : self._starts[item] + size].view(dtype)
            codes.append(encode(new, base if self._base else None, room[at:]))
            base.copy_(new)
            at += encoded_bytes(codes[-1], len(new), dtype.itemsize)
        self._add(message.peer, room[:at])
        self._timer.lap("pack")
        return codes

    def _add(self, peer: int, body: torch.Tensor) -> None:
        if len(body):
            self._outgoing.append((peer, body))

    @override
    def outgoing(self, round: int) -> PeerTensors:
        if self._sends.relays:
            for message in self._sends.messages[round]:
                room, at = self._sends.room(message, round), 0
                for body in (self._bodies[self._sends.sources[item]] for item in message.items):
                    room[at : at + len(body)].copy_(body)
                    at += len(body)
                self._add(message.peer, room[:at])
        return self._outgoing

    @override
    def incoming(self, round: int) -> PeerTensors:
        self._channel.wait(self._announced)
        self._timer.lap("wire")
        mail = []
        for message, header in zip(self._receives.messages[round], self._headers, strict=True):
            refit, base, *codes = header.tolist()
            if refit != self._bases.refit or base not in (0, self._base):
                raise RefitError(
                    f"delta: rank {message.peer} is at refit {refit} with base {base or 'none'}, this rank at refit"
                    f" {self._bases.refit} with base {self._base or 'none'}: an earlier refit has failed"
                )
            room, at = self._receives.room(message, round), 0
            for item, code in zip(message.items, codes, strict=True):
                if not base and code % _MODES != FULL:
                    raise RefitError(f"delta: rank {message.peer} sends changes without a base")
                size = encoded_bytes(code, self._receives.numels[item], self._receives.dtypes[item].itemsize)
                self._codes[item], self._bodies[item] = code, room[at : at + size]
                at += size
            if at > message.starts[-1]:
                raise RefitError(f"delta: rank {message.peer} announces more bytes than its items have")
            if at:
                mail.append((message.peer, room[:at]))
        return mail

    @override
    def apply(self, round: int) -> None:
        for message in self._receives.messages[round]:
            for item in message.items:
                view = self._write(item)
                self._timer.lap("apply")
                self._receives.hash(item, view)
                self._timer.lap("digest")
        self._receives.finish(round)
        self._timer.lap("apply")

    def _write(self, item: int) -> torch.Tensor:
        """Write an item, and return its values as they are stored then, in its shape on disk."""
        receives, view = self._receives, self._receives.view(item)
        positions, values = decode(self._bodies.pop(item), self._codes[item], receives.numels[item], receives.dtypes[item])
        if receives.in_place(item):
            base = view
        elif item in self._bases.received:
            base = self._bases.received[item]
        else:
            base = self._bases.received[item] = torch.empty(
                view.shape, dtype=receives.dtypes[item], device=self._channel.device
            )
        if positions is None:
            base.copy_(values.view(view.shape))
        else:
            scatter(base, positions, values)
        return view if base is view else view.copy_(base)
