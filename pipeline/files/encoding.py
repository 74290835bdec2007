"""Encode messages between processes as msgpack, typed by annotations, with numpy arrays as raw bytes. Pickle is never used."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


def encode(message: Any) -> bytes:
    """Return a message as msgpack."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(body: bytes, kind: Any) -> Any:
    """Return a message of type `kind`. Raises msgspec.ValidationError if the body does not match it."""
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
