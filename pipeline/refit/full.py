"""Send items in full: gather them in the transfer dtype, and write them to the engine's tensors."""

from __future__ import annotations

import torch
from typing_extensions import override

from pipeline.refit.endpoints import Message, ReceiveEndpoint, SendEndpoint
from pipeline.refit.transfer import Encoding, PeerTensors, StageTimer


class FullEncoding(Encoding):
    """The Encoding of full items.

    An item that is contiguous at one end is not copied there: it is sent from, or received into, the tensor itself. Items in
    memory that both ends map are copied into that memory and out of it.
    """

    def __init__(self, sends: SendEndpoint, receives: ReceiveEndpoint, timer: StageTimer):
        self._sends = sends
        self._receives = receives
        self._timer = timer
        self._packed: PeerTensors = []
        self._landed: dict[int, torch.Tensor] = {}  # by item: in the transfer dtype
        self._written: set[int] = set()  # items received into the engine's own tensor

    @override
    def pack(self, round: int) -> None:
        self._packed = [] if self._sends.relays else self._gather(round)

    @override
    def outgoing(self, round: int) -> PeerTensors:
        return self._gather(round) if self._sends.relays else self._packed

    def _gather(self, round: int) -> PeerTensors:
        return [
            (message.peer, self._part(message, first, last, round))
            for message in self._sends.messages[round]
            for first, last in message.parts
        ]

    def _part(self, message: Message, first: int, last: int, round: int) -> torch.Tensor:
        """Return a part of a message, [bytes] uint8."""
        sends = self._sends
        values = [self._values(item) for item in message.items[first:last]]
        alone = last - first == 1 and message.peer not in sends.mapped_peers
        if alone and sends.in_one_piece(message.items[first], values[0]):
            part = values[0].view(-1).view(torch.uint8)
        else:
            for i, value in enumerate(values):
                values[i] = sends.staging_view(message, first + i, round).view(value.shape).copy_(value)
            part = sends.part(message, first, last, round)
        self._timer.lap("pack")
        for item, value in zip(message.items[first:last], values, strict=True):
            sends.hash(item, value)
        self._timer.lap("digest")
        return part

    def _values(self, item: int) -> torch.Tensor:
        source = self._sends.sources[item]
        return self._sends.view(item) if source < 0 else self._landed[source]

    @override
    def incoming(self, round: int) -> PeerTensors:
        receives, mail = self._receives, []
        for message in receives.messages[round]:
            for first, last in message.parts:
                alone = last - first == 1 and message.peer not in receives.mapped_peers
                target = self._target(message, first) if alone else None
                if target is not None:
                    self._landed[message.items[first]] = target
                    self._written.add(message.items[first])
                    mail.append((message.peer, target.view(-1).view(torch.uint8)))
                    continue
                for position in range(first, last):
                    item = message.items[position]
                    self._landed[item] = receives.staging_view(message, position, round).view(receives.shapes[item])
                mail.append((message.peer, receives.part(message, first, last, round)))
        return mail

    def _target(self, message: Message, position: int) -> torch.Tensor | None:
        """Return the engine's own memory for an item, or None if it cannot be received there."""
        item = message.items[position]
        if not self._receives.in_place(item):
            return None
        view = self._receives.view(item)
        return view if self._receives.in_one_piece(item, view) else None

    @override
    def apply(self, round: int) -> None:
        for message in self._receives.messages[round]:
            for first, last in message.parts:
                self._write(message.items[first:last])
        self._receives.finish(round)
        self._timer.lap("apply")

    def _write(self, items: list[int]) -> None:
        views = []
        for item in items:
            landed = self._landed.pop(item)
            views.append(landed if item in self._written else self._receives.view(item).copy_(landed))
        self._timer.lap("apply")
        for item, view in zip(items, views, strict=True):
            self._receives.hash(item, view)  # read back from where it was written
        self._timer.lap("digest")
