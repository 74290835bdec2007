"""Mathematical answers, judged by math-verify in processes of their own.

Comparing two expressions can take for ever, or all memory: sympy evaluates what a model wrote. So workers (`math_worker.py`)
that have loaded it judge answers in a fork of theirs, with a limit of seconds. What ends the fork is the answer's doing. A
worker itself reads none of them; one that is lost all the same is replaced. Worker and environment exchange lines of JSON over
pipes. Of this process's environment variables a worker has those of KEPT, which hold no secrets.

Leaves out: rewards for form.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.environments.base import BuiltinEnvironment, Environment, EnvironmentContext, Outcome, Unjudged
from pipeline.environments.dapo_math import DAPOMath

if TYPE_CHECKING:
    from pipeline.types import Prompt

START_TIMEOUT_S = 300.0  # importing sympy, on a cold network file system
OWN_SHARE, WAIT_SHARE = 0.5, 0.25
"""The share of `timeout_s` that an answer may take, and that it may wait for a worker in the place of a lost one."""
KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "PYTHONHOME", "PYTHONUSERBASE")
"""To find Python and its packages."""
PACKAGE_ROOT = Path(__file__).parents[2]


@dataclass
class MathArguments:
    math_verify_impl: Annotated[
        Literal["hf_math_verify", "dapo_math_verify"],
        Field(
            description="hf_math_verify: whether math-verify finds the answers equal. dapo_math_verify: whether they are the"
            " same after `Answer:`."
        ),
    ] = "hf_math_verify"


class Math(BuiltinEnvironment):
    """Reward 1 if math-verify finds the text's answer equal to `prompt.task["answer"]`, else 0.

    `timeout_s` is for one step, OWN_SHARE of it for the answer. Metrics: `accuracy`; `timeout`, 1 if it took longer; `crash`, 1
    if its judgement died of it; of these two the reward is 0. workers: how many processes judge, each one answer at a time.
    Raises RuntimeError if one does not start.
    """

    Arguments = MathArguments

    @classmethod
    def build(cls, arguments: MathArguments, context: EnvironmentContext) -> Environment:
        return DAPOMath() if arguments.math_verify_impl == "dapo_math_verify" else cls(arguments, context)

    def __init__(self, arguments: MathArguments, context: EnvironmentContext) -> None:
        workers = context.workers or 1
        self.workers, self._timeout_s = workers, context.timeout_s
        # The kernel ends a worker with the thread that started it; so these threads start all, and live until `close`.
        self._starters = ThreadPoolExecutor(workers, thread_name_prefix="math")
        self._processes: list[_MathWorker] = []
        self._idle: queue.SimpleQueue[_MathWorker | Exception] = queue.SimpleQueue()  # in a worker's place, why there is none
        for _ in range(workers):
            self._starters.submit(self._start)
        started = [self._idle.get() for _ in range(workers)]
        for worker in started:
            if isinstance(worker, Exception):
                self.close()
                raise worker
            self._idle.put(worker)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Raises Unjudged if math-verify can read nothing in the expected answer, or if no worker answers.

        A worker that did not answer is replaced. The next step may wait for the new one to be ready, and leaves it to the one
        after that if this takes too long.
        """
        question = {"expected": prompt.task["answer"], "text": text, "timeout_s": OWN_SHARE * self._timeout_s}
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
            reply = worker.ask(question, deadline - time.monotonic())
        except BaseException as error:  # it may be in the midst of the answer
            self._replace(worker)
            if isinstance(error, OSError | EOFError):  # the fork that an answer can hold up or end is not the worker
                raise Unjudged(f"prompt {prompt.index}: {error}") from None
            raise
        self._idle.put(worker)
        if "error" in reply:
            raise Unjudged(f"prompt {prompt.index}: {reply['error']}")
        return Outcome(float(reply.get("right", False)), _metrics(**reply))

    def close(self) -> None:
        for worker in tuple(self._processes):
            worker.process.kill()  # also those that are not ready: nobody waits for them any more
        self._starters.shutdown(wait=True, cancel_futures=True)
        for worker in tuple(self._processes):
            self._end(worker)

    def _start(self) -> None:
        """Ends when the worker is ready: only then can it be asked."""
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


def _metrics(right: bool = False, timeout: bool = False, crash: bool = False) -> dict[str, float]:
    return {"accuracy": float(right), "timeout": float(timeout), "crash": float(crash)}


class _MathWorker:
    """The process. Its error messages are on this process's stderr."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.environments.math_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in KEPT if name in os.environ} | {"PYTHONPATH": path},
        )
        self._received = b""

    def wait_until_ready(self) -> None:
        """Returns once it has imported what it needs. Raises RuntimeError if it does not get there."""
        try:
            self._receive(START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            self.kill()
            raise RuntimeError(f"the math worker did not start: {error!r}, exit status {self.process.returncode}") from error

    def ask(self, question: dict[str, str | float], timeout_s: float) -> dict[str, object]:
        """One question, one reply. Raises TimeoutError, or EOFError if the worker dies."""
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError("the math worker is gone") from None
        return self._receive(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # what was still to be written was for the dead

    def _receive(self, timeout_s: float) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()  # select knows no descriptor above 1023
        poll.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the math worker did not reply within {timeout_s:g} s")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError("the math worker died")
            self._received += chunk
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)
