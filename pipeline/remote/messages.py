"""What travels: envelopes through the store, and bodies that are too large for it over the spanning group."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pipeline.world import World

INLINE = 1 << 20  # bytes; the store refuses messages above 8 MiB
STOP = "stop"


class Envelope(msgspec.Struct, array_like=True):
    """What travels through the store."""

    call: int
    rank: int  # the sender's
    verb: str
    body: bytes  # empty if it follows over the spanning group
    settled: int = 0  # rank 0 has taken the replies to all calls below this number
    follows: int = 0  # bytes that follow
    error: str = ""  # the traceback, instead of a reply
    more: bool = False  # other parts of the answer follow
    account: tuple[float, float] = (0.0, 0.0)  # seconds that the sender has waited, of those that it has lived


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(body: bytes, kind: Any) -> Any:
    """Raises msgspec.ValidationError if the body is not a `kind`."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    raise NotImplementedError(f"a {kind.__name__} cannot be received")


def follow(world: World, envelope: Envelope) -> bytes:
    if not envelope.follows:
        return envelope.body
    tensor = torch.empty(envelope.follows, dtype=torch.uint8)
    dist.recv(tensor, envelope.rank, group=world.spanning)
    return tensor.numpy().tobytes()


def queue_of(rank: int) -> str:
    return f"queue/{rank}"
