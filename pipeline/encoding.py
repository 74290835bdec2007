"""Messages between processes: msgpack, typed by annotations, with numpy arrays as raw bytes. Never a pickle."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(body: bytes, kind: Any) -> Any:
    """Return the message of a body. Raises msgspec.ValidationError if it is not a `kind`."""
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
