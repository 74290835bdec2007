"""Judge mathematical answers with math-verify, in separate processes.

Comparing two expressions can take forever or use all memory, since sympy evaluates what a model wrote. So worker processes
(`math_worker.py`) that have loaded math-verify judge each answer in a fork with a time limit. If the fork dies, the answer
caused it. A worker itself reads no answer; a lost worker is replaced all the same. Worker and environment exchange lines of
JSON over pipes. A worker gets the environment variables in INHERITED_VARIABLES, which hold no secrets.

Leaves out: rewards for format.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.environments.dapo_math import DAPOMath, normalize
from pipeline.environments.environment import BuiltinEnvironment, Environment, EnvironmentContext, Outcome, Unjudged

if TYPE_CHECKING:
    from pipeline.types import Prompt

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0  # importing sympy, on a cold network file system
OWN_SHARE, WAIT_SHARE = 0.5, 0.25
"""Shares of `timeout_s` for judging an answer, and for waiting until a lost worker is replaced."""
INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "PYTHONHOME", "PYTHONUSERBASE")
"""They locate Python and its packages."""
PACKAGE_ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\s*(?:\\?\$)?\s*-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?\.?\s*")
"""An expected answer that needs no check: `42`, `$1,234.50`, `3/4`, `42.`."""
READ_S = 5.0  # to read an expected answer, which takes milliseconds


@dataclass
class MathArguments:
    """The kwargs of `kind: math`."""

    math_verify_impl: Annotated[
        Literal["hf_math_verify", "dapo_math_verify"],
        Field(description="hf_math_verify: math-verify compares the answers. dapo_math_verify: texts after `Answer:` are."),
    ] = "hf_math_verify"


class Math(BuiltinEnvironment):
    """Reward 1 if math-verify finds the text's answer equal to `prompt.task["answer"]`, else 0.

    `timeout_s` is for one step, OWN_SHARE of it for the answer. Metrics: `accuracy`; `timeout`, 1 if it took longer; `crash`, 1
    if it ended its fork; `unparsed`, 1 if the text has neither a number nor a formula; these three have reward 0. workers:
    processes that judge, each one answer at a time. Raises RuntimeError if a worker does not start.
    """

    Arguments = MathArguments
    checked_at_start = 300  # a formula takes milliseconds

    @classmethod
    @override
    def build(cls, arguments: MathArguments, context: EnvironmentContext) -> Environment:
        return DAPOMath() if arguments.math_verify_impl == "dapo_math_verify" else cls(arguments, context)

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: MathArguments) -> None:
        if arguments.math_verify_impl == "dapo_math_verify":
            if not normalize(answer):
                raise ValueError(f"got '{answer}', of which DAPO's normal form leaves nothing")
        elif not NUMBER.fullmatch(answer) and not is_readable(answer):
            raise ValueError(
                f"got '{answer}', in which math-verify reads no expression; expected LaTeX, such as x^2+1 or \\frac{{1}}{{2}}"
            )

    def __init__(self, arguments: MathArguments, context: EnvironmentContext) -> None:
        workers = context.workers or 1
        self.workers, self._timeout_s = workers, context.timeout_s
        # The kernel ends a worker with the thread that started it, so these threads start all workers and run until `close`.
        self._starters = ThreadPoolExecutor(workers, thread_name_prefix="math")
        self._processes: list[_MathWorker] = []
        self._idle: queue.SimpleQueue[_MathWorker | Exception] = (
            queue.SimpleQueue()
        )  # or, in a worker's place, why it is missing
        for _ in range(workers):
            self._starters.submit(self._start)
        started = [self._idle.get() for _ in range(workers)]
        for worker in started:
            if isinstance(worker, Exception):
                self.close()
                raise worker
            self._idle.put(worker)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge an answer. Raises Unjudged if math-verify cannot parse the expected answer, or if no worker answers.

        A worker that did not answer is replaced. The next step waits for the new one up to WAIT_SHARE of its time.
        """
        request = {"expected": prompt.task["answer"], "text": text, "timeout_s": OWN_SHARE * self._timeout_s}
        deadline = time.monotonic() + self._timeout_s
        wait_s = WAIT_SHARE * self._timeout_s
        try:
            worker = self._idle.get(timeout=wait_s)
        except queue.Empty:
            raise Unjudged(f"no math worker was ready within {wait_s:g} s") from None
        if isinstance(worker, Exception):
            self._starters.submit(self._start)
            raise Unjudged(str(worker)) from worker
        try:
            reply = worker.judge(request, deadline - time.monotonic())
        except BaseException as error:  # it may still judge the answer
            self._replace(worker)
            if isinstance(error, OSError | EOFError):  # an answer can hang or end the fork, not the worker
                raise Unjudged(f"prompt {prompt.index}: {error}") from None
            raise
        self._idle.put(worker)
        if "error" in reply:
            raise Unjudged(f"prompt {prompt.index}: {reply['error']}")
        told = {"accuracy": "right", "timeout": "timeout", "crash": "crash", "unparsed": "unparsed"}
        metrics = {metric: float(reply.get(name) is True) for metric, name in told.items()}
        return Outcome(metrics["accuracy"], metrics, extracted=str(reply.get("extracted", "")))

    @override
    def close(self) -> None:
        for worker in tuple(self._processes):
            worker.process.kill()  # also workers that are not ready yet
        self._starters.shutdown(wait=True, cancel_futures=True)
        for worker in tuple(self._processes):
            self._end(worker)

    def _start(self) -> None:
        """Start a worker, wait until it is ready, and put it among the idle ones."""
        try:
            worker = _MathWorker()
        except OSError as error:
            self._idle.put(error)
            return
        self._processes.append(worker)
        try:
            worker.wait_until_ready()
        except Exception as error:
            self._end(worker)
            self._idle.put(error)
        else:
            self._idle.put(worker)

    def _replace(self, worker: _MathWorker) -> None:
        self._end(worker)
        self._starters.submit(self._start)

    def _end(self, worker: _MathWorker) -> None:
        worker.kill()
        self._processes.remove(worker)


class _MathWorker:
    """A worker process. It writes error messages to this process's stderr."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.environments.math_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ} | {"PYTHONPATH": path},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._received = b""

    def wait_until_ready(self) -> None:
        """Wait until the worker has loaded math-verify. Raises RuntimeError if it fails."""
        try:
            self._receive(START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            self.kill()
            raise RuntimeError(f"the math worker did not start: {error!r}, exit status {self.process.returncode}") from error

    def judge(self, request: dict[str, str | float], timeout_s: float) -> dict[str, object]:
        """Send one request and return the reply. Raises TimeoutError, or EOFError if the worker dies."""
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise EOFError("the math worker has ended") from None
        return self._receive(timeout_s)

    def kill(self) -> None:
        """End the process and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._stdin, self._stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # the worker ended before it read everything

    def _receive(self, timeout_s: float) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()  # select does not take descriptors above 1023
        poll.register(self._stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the math worker did not reply within {timeout_s:g} s")
            chunk = os.read(self._stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError("the math worker died")
            self._received += chunk
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)


# ---- expected answers --------------------------------------------------------------------------------------------------------

_reader_lock = threading.Lock()
_reader: _MathWorker | None = None  # started for the first expected answer that is not a number; ends with this process


@functools.lru_cache(maxsize=1 << 16)
def is_readable(answer: str) -> bool:
    """Return whether math-verify reads an expression in an expected answer.

    True if that cannot be known here: without the package, as on a login node, without a process, or within READ_S on a busy
    machine. The job then judges by it.
    """
    global _reader
    if importlib.util.find_spec("math_verify") is None:
        return True
    with _reader_lock:
        for _ in range(2):
            try:
                if _reader is None:
                    _reader = _MathWorker()
                    _reader.wait_until_ready()
                reply = _reader.judge({"expected": answer, "timeout_s": READ_S}, 3 * READ_S)
                return reply.get("right") is True or "timeout" in reply
            except (OSError, EOFError, RuntimeError) as error:
                logger.warning("could not ask math-verify about the expected answer %r: %s", answer, error)
                if _reader is not None:
                    _reader.kill()
                _reader = None
    return True
