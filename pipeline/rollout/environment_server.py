"""The process in which the environments of an engine run: `python -m pipeline.rollout.environment_server SOCKET MEMORY RANK`.

SOCKET and MEMORY are descriptors that it inherits, RANK is its parent's process id. It ends with the rank, whatever it does.
Signals that tell the rank to leave do not end it: the rank's last step still needs answers. Short of memory, the kernel takes
it before the rank.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback

from pipeline import own_code, rank_log
from pipeline.environments.base import WornOut
from pipeline.rollout.environment_messages import BEAT_S, WORN_OUT, Answer, Order, Report, frame, messages
from pipeline.rollout.environment_pool import Failure, encodable
from pipeline.rollout.environment_threads import EnvironmentSettings, EnvironmentThreads, load
from pipeline.rollout.hearing import Heard
from pipeline.sandbox import kernel

NAME = b"hetstep-env"
"""As ps and top show it: 15 bytes at most."""
OOM_SCORE = 500
"""See kernel.offer_to_oom_killer. Of a rank it is 0, of what guards a program in the sandbox 999."""


def run(connection: socket.socket, judging: mmap.mmap, rank: int) -> None:
    """Serve the rank until it closes the environments. Call it in the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that an environment starts would inherit
    kernel.die_with_parent()
    if os.getppid() != rank:  # it died before it could be said
        return
    kernel.prctl(kernel.PR_SET_NAME, NAME)
    with contextlib.suppress(OSError):
        kernel.offer_to_oom_killer(OOM_SCORE)
    rank_log.guard()
    stream = connection.makefile("rb")
    settings = next(messages(stream, EnvironmentSettings), None)
    if settings is None:  # the rank has ended, or needs no environments
        return
    own_code.search_in(settings.folders)
    news: threading.Event = threading.Event()
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def listen() -> None:
        for order in messages(stream, Order):
            orders.put(order)
            news.set()
        os._exit(1)  # the rank is gone

    try:
        environments = load(settings, news)
        threading.Thread(target=listen, name="orders", daemon=True).start()
        connection.sendall(frame(Report()))
        _serve(environments, connection, judging, orders, news)
        environments.close()
    except WornOut as error:  # no environment can be closed beside calls that hang
        print(f"hetstep: {encodable(str(error))}", flush=True)
        os._exit(1 if error.judged else WORN_OUT)
    except MemoryError:  # an answer took it: as if the kernel had ended the process
        os._exit(1)
    except Exception as error:
        told = [type(error).__name__, str(error), traceback.format_exc()]
        connection.sendall(frame(Report([], *map(encodable, told))))


def _serve(
    environments: EnvironmentThreads,
    connection: socket.socket,
    judging: mmap.mmap,
    orders: queue.SimpleQueue[Order],
    news: threading.Event,
) -> None:
    calls: dict[str, int] = {}  # open ones, by their episodes
    reported = time.monotonic()
    while True:
        left = environments.seconds_left()
        news.wait(left if left is None else min(left, BEAT_S))
        news.clear()
        while not orders.empty():
            order = orders.get()
            if order.said is not None:
                calls[order.said.episode] = order.call
                environments.submit(order.said, functools.partial(judging.__setitem__, order.call))
            elif order.forget:
                environments.forget(order.forget)
            else:
                return
        answers = [_answer(calls.pop(episode), answer) for episode, answer in environments.take()]
        if answers or (calls and time.monotonic() > reported + BEAT_S / 2):
            connection.sendall(frame(Report(answers)))
            reported = time.monotonic()


def _answer(call: int, answer: Heard | Failure) -> Answer:
    return Answer(call, None, answer.why, answer.of_answer) if isinstance(answer, Failure) else Answer(call, answer)


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # threads of an environment may hang
