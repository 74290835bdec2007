"""A judge: a fork of the environments' process that steps one environment, with limits on memory and variables.

A message between processes is its length in four bytes, then msgpack. A judge also shares 16 bytes of memory with its parent,
in which it notes the part of the call that it has reached. So if a judge dies, the parent knows whether it had seen the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pipeline.environments.environment import EpisodeFailed, JudgeLimits, ProcessStuck
from pipeline.files.encoding import decode, encode
from pipeline.rollout.function_messages import FunctionCall
from pipeline.rollout.judges.environment_steps import (
    AGENT,
    FUNCTION,
    PARTS_BEFORE_ANSWER,
    WAITS,
    EnvStepper,
    StepOutcome,
    StepRequest,
    encodable,
    failure_of,
    is_final,
)
from pipeline.rollout.judges.function_steps import FunctionStepper
from pipeline.sandbox import linux

NAME = b"hetstep-judge"
"""The process name that ps and top show; at most 15 bytes."""
OOM_SCORE = 750
"""A judge's value for linux.raise_oom_score. Its parent has 500, the guard of a sandboxed program 999."""
TRACEBACK_CHARS = 4000  # the last characters of a traceback
PARTS = (*PARTS_BEFORE_ANSWER, "decoding the answer", "step", "its answer", FUNCTION, AGENT, WAITS)


class EnvCommand(msgspec.Struct, array_like=True):
    """A command of the rank: judge a turn (`request`), forget an episode (only `episode`), or close and end (neither).

    A `request` without a call brings an agent's completions, and has no reply.
    """

    call: int = 0
    episode: str = ""
    request: bytes = b""  # an encoded StepRequest, which only a judge reads
    environment: str = ""
    title: str = ""
    begins: bool = False  # it is the episode's first turn


class EnvReply(msgspec.Struct, array_like=True):
    """The answer to one call."""

    call: int
    outcome: StepOutcome | None
    failure: str = ""  # why there is no outcome
    of_answer: bool = False  # see `CallFailure`
    open: bool = False  # the episode goes on
    stuck: bool = False  # calls hang in the judge, so that another one must replace it
    cpu_s: float = 0.0  # of the call
    traceback: str = ""  # or the notes of an EpisodeFailed
    notes: dict[str, str] = {}  # of a failure, see Outcome


def frame(message: Any) -> bytes:
    """Return the message as bytes, with its length in front."""
    body = encode(message)
    return struct.pack("<I", len(body)) + body


def messages(stream: BinaryIO, kind: Any) -> Iterator[Any]:
    """Yield messages of one kind until the other end closes the connection."""
    while len(length := stream.read(4)) == 4:
        (size,) = struct.unpack("<I", length)
        body = stream.read(size)
        if len(body) < size:
            return
        yield decode(body, kind)


async def read_message(reader: asyncio.StreamReader, kind: Any, most_bytes: int | None = None) -> tuple[Any, bytes]:
    """Return (the next message, its frame).

    Raises IncompleteReadError or OSError if the connection ends, ValueError for a message that is longer than `most_bytes`, and
    the errors of decoding.
    """
    length = await reader.readexactly(4)
    (size,) = struct.unpack("<I", length)
    if most_bytes is not None and size > most_bytes:
        raise ValueError(f"got {size} bytes; expected at most {most_bytes}")
    body = await reader.readexactly(size)
    return decode(body, kind), length + body


def how_ended(status: int) -> str:
    """Return how a process with this exit status ended; a negative status is a signal's number."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Progress:
    """The part of a call that a judge has reached, and the time at which the part began, in memory that forks share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    def begin(self, part: str) -> None:
        """Note that a part begins."""
        self._memory[:] = struct.pack("dq", time.monotonic(), PARTS.index(part))  # at once; pack_into would write zeros first

    def read(self) -> tuple[str, float]:
        """Return (part, time.monotonic() at which it began)."""
        begun, part = struct.unpack_from("dq", self._memory)
        return PARTS[part], begun


def run(
    connection: socket.socket, progress: Progress, limits: JudgeLimits, load: Callable[[], EnvStepper | FunctionStepper]
) -> None:
    """Judge turns until the parent sends the command to end.

    load: a function that builds the stepper.
    """
    parent = os.getppid()
    linux.die_with_parent()
    if os.getppid() != parent:
        return
    linux.prctl(linux.PR_SET_NAME, NAME)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # orphans of an open episode stay this judge's until it ends
    with contextlib.suppress(OSError):
        linux.raise_oom_score(OOM_SCORE)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as Python's own `random` does by itself; else all judges draw the same numbers
    stepper, judge = load(), os.getpid()
    if limits.memory_bytes is not None:
        _bound_memory(limits.memory_bytes)
    if limits.variables is not None:
        _keep_variables(limits.variables)
    progress.begin("")
    if isinstance(stepper, FunctionStepper):
        asyncio.run(_serve_function(connection, stepper, progress))
        return
    for command in messages(connection.makefile("rb"), EnvCommand):
        if command.request:
            begun = time.process_time()
            reply = _judge(stepper, command, progress)
            if os.getpid() != judge:
                os._exit(0)  # a fork that the answer has made
            reply.cpu_s = time.process_time() - begun
            connection.sendall(frame(reply))
        elif command.episode:
            stepper.forget(command.episode)
        else:
            stepper.environment.close()
            return


async def _serve_function(connection: socket.socket, stepper: FunctionStepper, progress: Progress) -> None:
    """Run a rollout function until the parent sends the command to end. The function's tasks go on between two calls."""
    reader, writer = await asyncio.open_connection(sock=connection)
    answering: set[asyncio.Task[None]] = set()
    while True:
        try:
            command, _ = await read_message(reader, EnvCommand)
        except (asyncio.IncompleteReadError, OSError):
            return  # the parent is gone
        if command.call:
            task = asyncio.ensure_future(_answer(writer, stepper, command, progress))
            answering.add(task)
            task.add_done_callback(answering.discard)
        elif command.request:
            stepper.deliver(decode(command.request, FunctionCall), progress.begin)
        elif command.episode:
            stepper.forget(command.episode)
        else:
            stepper.environment.close()
            return


async def _answer(writer: asyncio.StreamWriter, stepper: FunctionStepper, command: EnvCommand, progress: Progress) -> None:
    judge, begun = os.getpid(), time.process_time()
    try:
        outcome = await stepper.step(decode(command.request, FunctionCall), progress.begin)
        reply = _reply(stepper, command, outcome, is_final(False, outcome))
    except BaseException as error:
        reply = _failure(stepper, command, error, progress)
    if os.getpid() != judge:
        os._exit(0)  # a fork that the function has made
    reply.cpu_s = time.process_time() - begun
    writer.write(frame(reply))
    await writer.drain()


def _judge(stepper: EnvStepper, command: EnvCommand, progress: Progress) -> EnvReply:
    try:
        request = decode(command.request, StepRequest)
        outcome = stepper.step(request, progress.begin)
    except BaseException as error:  # SystemExit too, which would end the judge
        return _failure(stepper, command, error, progress)
    return _reply(stepper, command, outcome, is_final(request.last, outcome))


def _reply(stepper: EnvStepper | FunctionStepper, command: EnvCommand, outcome: StepOutcome, final: bool) -> EnvReply:
    if final:
        stepper.forget(command.episode)
    return EnvReply(command.call, outcome, open=not final)


def _failure(stepper: EnvStepper | FunctionStepper, command: EnvCommand, error: BaseException, progress: Progress) -> EnvReply:
    stepper.forget(command.episode)
    failure, stuck = failure_of(error, progress.read()[0]), isinstance(error, ProcessStuck)
    trace = encodable("".join(traceback.format_exception(error))[-TRACEBACK_CHARS:])
    if isinstance(error, EpisodeFailed):
        trace = "\n".join(f"{name}:\n{text}" for name, text in failure.notes.items())
    of_failure: dict[str, Any] = {"traceback": trace, "notes": failure.notes}
    return EnvReply(command.call, None, failure.why, failure.of_answer, stuck=stuck, **of_failure)


def _bound_memory(extra: int) -> None:
    """Limit the address space of this process to its present size plus `extra` bytes."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = now + extra if hard == resource.RLIM_INFINITY else min(now + extra, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _keep_variables(names: tuple[str, ...]) -> None:
    """Remove all variables but `names` from this process's environment, and overwrite all of them in /proc/self/environ."""
    kept = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.clear()
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])  # see proc(5)
    ctypes.memset(begin, 0, end - begin)
    os.environ.update(kept)
