"""Run the environments of an engine in a process of their own.

Started as `python -m pipeline.rollout.environment_server SOCKET MEMORY RANK`. SOCKET and MEMORY are inherited descriptors, RANK
is the process id of the parent, an engine's rank. The process always ends with the rank. Signals that ask the rank to stop do
not end it, because the rank's last step still needs answers. If memory runs out, the kernel kills it before the rank.

A message between the two is four bytes of length and msgpack. They also share memory in which the process marks the turns that
it is judging: when it dies, the rank knows which these were.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from pipeline.environments.environment import ProcessStuck
from pipeline.files import rank_log
from pipeline.files.encoding import decode, encode
from pipeline.recipe import user_code
from pipeline.rollout.environment_pool import CallFailure, encodable
from pipeline.rollout.environment_threads import EnvironmentSettings, EnvironmentThreads, StepOutcome, StepRequest, load
from pipeline.sandbox import linux

logger = logging.getLogger("pipeline.rollout.environment_server")  # __name__ is "__main__", of which no format is known

NAME = b"hetstep-env"
"""The process name that ps and top show; at most 15 bytes."""
OOM_SCORE = 500
"""See linux.raise_oom_score. A rank has 0, the guard of a sandboxed program 999."""
MAX_OPEN_CALLS = 1 << 20
"""Most open calls, and bytes of the shared memory: a call's byte is 1 while its turn is judged."""
EXIT_WORN_OUT = 75
"""Exit status of a process that asks to be replaced; EX_TEMPFAIL of sysexits.h."""
HEARTBEAT_S = 1.0
"""Most seconds between two reports while calls are open."""


class EnvCommand(msgspec.Struct, array_like=True):
    """A command of the rank: judge a turn, forget an episode, or, with neither, close the environments and end."""

    call: int = 0
    request: StepRequest | None = None
    forget: str = ""


class EnvReply(msgspec.Struct, array_like=True):
    """The answer to one call."""

    call: int
    outcome: StepOutcome | None
    failure: str = ""  # why there is no outcome
    of_answer: bool = False  # see `CallFailure`


class EnvReport(msgspec.Struct, array_like=True):
    """A report of the process: the answers since the last one. The first report states that the environments are loaded."""

    replies: list[EnvReply] = []
    error: str = ""  # type of the exception that ends the process
    message: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception) -> EnvReport:
        """Return the report of an exception, with its traceback."""
        return cls([], *map(encodable, (type(error).__name__, str(error), "".join(traceback.format_exception(error)))))


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


def run(connection: socket.socket, judging: mmap.mmap, rank: int) -> None:
    """Serve the rank until it closes the environments. Call it in the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which an environment's subprocesses would inherit
    linux.die_with_parent()
    if os.getppid() != rank:  # the rank died before die_with_parent
        return
    linux.prctl(linux.PR_SET_NAME, NAME)
    with contextlib.suppress(OSError):
        linux.raise_oom_score(OOM_SCORE)
    rank_log.set_up()
    stream = connection.makefile("rb")
    settings = next(messages(stream, EnvironmentSettings), None)
    if settings is None:  # the rank has ended, or needs no environments
        return
    user_code.search_in(settings.folders)
    wakeup: threading.Event = threading.Event()
    commands: queue.SimpleQueue[EnvCommand | Exception] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for command in messages(stream, EnvCommand):
                commands.put(command)
                wakeup.set()
        except Exception as error:  # `_serve` raises it: only the main thread sends
            commands.put(error)
            wakeup.set()
        else:
            os._exit(1)  # the rank is gone

    try:
        environments = load(settings, wakeup)
        threading.Thread(target=listen, name="commands", daemon=True).start()
        connection.sendall(frame(EnvReport()))
        _serve(environments, connection, judging, commands, wakeup)
        environments.close()
    except ProcessStuck as error:  # calls hang, so no environment can be closed
        logger.error(encodable(str(error)))
        os._exit(1 if error.caused_by_answer else EXIT_WORN_OUT)
    except MemoryError:  # of an answer; end as if the kernel had killed the process
        os._exit(1)
    except Exception as error:
        connection.sendall(frame(EnvReport.of(error)))


def _serve(
    environments: EnvironmentThreads,
    connection: socket.socket,
    judging: mmap.mmap,
    commands: queue.SimpleQueue[EnvCommand | Exception],
    wakeup: threading.Event,
) -> None:
    calls: dict[str, int] = {}  # open calls, by episode
    reported = time.monotonic()
    while True:
        left = environments.seconds_left()
        wakeup.wait(left if left is None else min(left, HEARTBEAT_S))
        wakeup.clear()
        while not commands.empty():
            command = commands.get()
            if isinstance(command, Exception):
                raise command
            if command.request is not None:
                calls[command.request.episode] = command.call
                environments.submit(command.request, functools.partial(judging.__setitem__, command.call))
            elif command.forget:
                environments.forget(command.forget)
            else:
                return
        replies = [_reply(calls.pop(episode), answer) for episode, answer in environments.take()]
        if replies or (calls and time.monotonic() > reported + HEARTBEAT_S / 2):
            connection.sendall(frame(EnvReport(replies)))
            reported = time.monotonic()


def _reply(call: int, answer: StepOutcome | CallFailure) -> EnvReply:
    return EnvReply(call, None, answer.why, answer.of_answer) if isinstance(answer, CallFailure) else EnvReply(call, answer)


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # threads of an environment may hang
