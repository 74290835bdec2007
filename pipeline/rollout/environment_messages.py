"""What an engine's rank and the process of its environments say to each other, over a pair of sockets.

A message is four bytes of length and msgpack. Besides, the two share memory in which the process marks the turns that it is
judging: when it dies, the rank still knows which these were.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from pipeline.encoding import decode, encode
from pipeline.rollout.hearing import Heard, Said

CALLS = 1 << 20
"""Bytes of the shared memory, one for each call that may be open: 1 while it is carried out."""
WORN_OUT = 75
"""The status with which a process ends so that another takes its place; EX_TEMPFAIL of sysexits.h."""
BEAT_S = 1.0
"""While calls are open the process reports at least so often."""


class Order(msgspec.Struct, array_like=True):
    """From the rank: hear a turn, forget an episode, or, with neither, close the environments and end."""

    call: int = 0
    said: Said | None = None
    forget: str = ""


class Answer(msgspec.Struct, array_like=True):
    call: int
    heard: Heard | None
    failure: str = ""  # why there is nothing heard
    of_answer: bool = False  # see `Failure`


class Report(msgspec.Struct, array_like=True):
    """From the process: answers since the last report. The first report says that the environments are loaded."""

    answers: list[Answer] = []
    error: str = ""  # the type of an exception with which the process ends
    message: str = ""
    traceback: str = ""


def frame(message: Any) -> bytes:
    body = encode(message)
    return struct.pack("<I", len(body)) + body


def messages(stream: BinaryIO, kind: Any) -> Iterator[Any]:
    """Yield messages of one kind until the other end is gone."""
    while len(length := stream.read(4)) == 4:
        (size,) = struct.unpack("<I", length)
        body = stream.read(size)
        if len(body) < size:
            return
        yield decode(body, kind)
