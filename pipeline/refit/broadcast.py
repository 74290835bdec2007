"""Refit by bucketed broadcast: rank 0 gathers one full tensor after another and broadcasts them to every generate rank.

The simplest right transfer, and the reference for others. Each tensor crosses the wire once, to everybody; a generate rank
receives more than its shard and drops what it does not own. Memory on either side is one bucket and one full tensor.

On the wire a bucket is: the length of its table, the table (msgpack: name, dtype, shape, offset), the bytes. A table of length
zero ends the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist

from pipeline.generate.base import GenerateBackend
from pipeline.train.base import TrainBackend
from pipeline.world import World

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
ALIGNMENT = 16  # bytes, so that a view of any dtype into a bucket is aligned


class Entry(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes into the bucket


class BroadcastRefit:
    def __init__(self, world: World, bucket_bytes: int):
        self._world = world
        self._bucket_bytes = bucket_bytes

    def send(self, backend: TrainBackend) -> int:
        weights = backend.weights()
        if self._world.rank != 0:
            for _ in weights:  # gathering a full tensor needs every rank of the realm
                pass
            return 0
        bucket = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._world.device)
        table: list[Entry] = []
        size = sent = 0
        for name, tensor in weights:
            grown = _padded(tensor.nbytes)
            if table and size + grown > self._bucket_bytes:
                sent += self._flush(table, bucket[:size])
                table, size = [], 0
            if grown > bucket.numel():
                bucket = torch.empty(grown, dtype=torch.uint8, device=self._world.device)
            table.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size))
            _view(bucket, table[-1]).copy_(tensor)
            size += grown
        sent += self._flush(table, bucket[:size])
        self._broadcast_table([])
        return sent

    def _flush(self, table: list[Entry], bucket: torch.Tensor) -> int:
        self._broadcast_table(table)
        self._broadcast(bucket)
        return bucket.numel()

    def receive(self, backend: GenerateBackend, version: int) -> None:
        backend.load_weights(self._receive_tensors(), version)

    def _receive_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        while table := self._receive_table():
            last = table[-1]
            size = last.offset + _padded(_bytes(last))
            bucket = torch.empty(size, dtype=torch.uint8, device=self._world.device)  # fresh: the engine may keep views of it
            self._broadcast(bucket)
            for entry in table:
                yield entry.name, _view(bucket, entry)

    def _broadcast_table(self, table: list[Entry]) -> None:
        body = msgspec.msgpack.encode(table) if table else b""
        self._broadcast(torch.tensor([len(body)], dtype=torch.int64, device=self._world.device))
        if body:
            self._broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8).to(self._world.device))

    def _receive_table(self) -> list[Entry]:
        length = torch.empty(1, dtype=torch.int64, device=self._world.device)
        self._broadcast(length)
        if not length.item():
            return []
        body = torch.empty(int(length.item()), dtype=torch.uint8, device=self._world.device)
        self._broadcast(body)
        return msgspec.msgpack.decode(body.cpu().numpy().tobytes(), type=list[Entry])

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0, group=self._world.refit)


def _view(bucket: torch.Tensor, entry: Entry) -> torch.Tensor:
    return bucket[entry.offset : entry.offset + _bytes(entry)].view(DTYPES[entry.dtype]).view(entry.shape)


def _bytes(entry: Entry) -> int:
    return torch.Size(entry.shape).numel() * DTYPES[entry.dtype].itemsize


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
