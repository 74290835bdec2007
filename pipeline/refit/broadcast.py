"""Refit by bucketed broadcast: rank 0 gathers one full tensor after another and broadcasts them to every generate rank.

This is the simplest correct transfer, and the reference for the other transfers. Every generate rank receives each tensor in
full, and drops the entries outside its shard. Each side needs memory for one bucket and one full tensor.

A bucket is sent as the length of its table, the table in msgpack (name, dtype, shape and offset of each tensor), and the bytes
of the tensors. A table of length zero ends the transfer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from typing_extensions import override

from pipeline.generate.generate_backend import WeightUpdate
from pipeline.job.world import World
from pipeline.refit.protocol import Refit, RefitReport
from pipeline.train.train_backend import TrainBackend

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
ALIGNMENT = 16  # bytes, so that a view of any dtype into a bucket is aligned


class BucketEntry(msgspec.Struct, array_like=True):
    """One tensor of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes into the bucket


class BroadcastRefit(Refit):
    """A Refit of full tensors in buckets of `bucket_bytes`."""

    def __init__(self, world: World, bucket_bytes: int):
        self._world = world
        self._bucket_bytes = bucket_bytes
        self._bytes, self._wire = 0, 0.0  # of this refit: bytes on the network, and seconds

    @override
    def send(self, backend: TrainBackend) -> RefitReport:
        start = self._begin()
        weights = backend.weights()
        if self._world.rank != 0:
            for _ in weights:  # gathering a full tensor needs every rank of the component
                pass
            total = time.perf_counter() - start
            return RefitReport(pack=total, total=total)
        bucket = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._world.carrier)
        table: list[BucketEntry] = []
        size = 0
        for name, tensor in weights:
            grown = _padded_size(tensor.nbytes)
            if table and size + grown > self._bucket_bytes:
                self._flush(table, bucket[:size])
                table, size = [], 0
            if grown > bucket.numel():
                bucket = torch.empty(grown, dtype=torch.uint8, device=self._world.carrier)
            table.append(BucketEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size))
            _view(bucket, table[-1]).copy_(tensor)
            size += grown
        self._flush(table, bucket[:size])
        self._broadcast_table([])
        total = time.perf_counter() - start
        return RefitReport(sent=self._bytes, pack=total - self._wire, wire=self._wire, total=total)

    def _flush(self, table: list[BucketEntry], bucket: torch.Tensor) -> None:
        self._broadcast_table(table)
        self._broadcast(bucket)

    @override
    def receive(self, update: WeightUpdate) -> RefitReport:
        start = self._begin()
        update.load(self._receive_tensors())
        total = time.perf_counter() - start
        return RefitReport(received=self._bytes, wire=self._wire, apply=total - self._wire, total=total)

    def _begin(self) -> float:
        self._bytes, self._wire = 0, 0.0
        return time.perf_counter()

    def _receive_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        while table := self._receive_table():
            last = table[-1]
            size = last.offset + _padded_size(_bytes(last))
            bucket = torch.empty(
                size, dtype=torch.uint8, device=self._world.carrier
            )  # a new one: the engine may keep views of it
            self._broadcast(bucket)
            for entry in table:
                yield entry.name, _view(bucket, entry)

    def _broadcast_table(self, table: list[BucketEntry]) -> None:
        body = msgspec.msgpack.encode(table) if table else b""
        self._broadcast(torch.tensor([len(body)], dtype=torch.int64, device=self._world.carrier))
        if body:
            self._broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8).to(self._world.carrier))

    def _receive_table(self) -> list[BucketEntry]:
        length = torch.empty(1, dtype=torch.int64, device=self._world.carrier)
        self._broadcast(length)
        if not length.item():
            return []
        body = torch.empty(int(length.item()), dtype=torch.uint8, device=self._world.carrier)
        self._broadcast(body)
        return msgspec.msgpack.decode(body.cpu().numpy().tobytes(), type=list[BucketEntry])

    def _broadcast(self, tensor: torch.Tensor) -> None:
        start = time.perf_counter()
        dist.broadcast(tensor, src=0, group=self._world.refit)
        self._wire += time.perf_counter() - start
        self._bytes += tensor.nbytes


def _view(bucket: torch.Tensor, entry: BucketEntry) -> torch.Tensor:
    return bucket[entry.offset : entry.offset + _bytes(entry)].view(DTYPES[entry.dtype]).view(entry.shape)


def _bytes(entry: BucketEntry) -> int:
    return torch.Size(entry.shape).numel() * DTYPES[entry.dtype].itemsize


def _padded_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
