"""Judge mathematical answers with math-verify (`math_comparison.py`), in judge processes with their own limits.

Comparing two expressions can take forever or use all memory. If a judge of this environment dies or exceeds its time, the
answer caused it. A judge keeps only the environment variables in KEPT_VARIABLES, which hold no secrets.

Leaves out: rewards for format.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from pipeline.environments import math_comparison
from pipeline.environments.dapo_math import DAPOMath, normalize
from pipeline.environments.environment import (
    BuiltinEnvironment,
    Environment,
    EnvironmentContext,
    JudgeLimits,
    Outcome,
    Unjudged,
)
from pipeline.node import python_path

if TYPE_CHECKING:
    from pipeline.types import Prompt

logger = logging.getLogger(__name__)

OWN_SHARE = 0.5  # share of `timeout_s` that a call has
MEMORY_BYTES = 4 << 30  # address space; an answer that needs more is wrong
SUSPECT_S = 0.1  # a right answer takes milliseconds, as does a fork
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPATH")
"""Variables that locate Python and its packages."""
NUMBER = re.compile(r"\s*(?:\\?\$)?\s*-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?\.?\s*")
"""An expected answer that needs no check: `42`, `$1,234.50`, `3/4`, `42.`."""
START_S = 300.0  # importing sympy, on a cold network file system
READ_S = 15.0  # to read an expected answer, which takes milliseconds


@dataclass
class MathArguments:
    """The kwargs of `kind: math`."""

    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """hf_math_verify: math-verify compares the answers. dapo_math_verify: DAPO's rules compare them."""


class Math(BuiltinEnvironment):
    """Rewards an answer that math-verify finds equal to `prompt.task["answer"]` with 1, else 0.

    A step has OWN_SHARE of `timeout_s`. Metrics: `accuracy`; `timeout`, 1 if the step took longer; `crash`, 1 if it raised an
    exception or ended its judge; `unparsed`, 1 if the text has neither a number nor a formula. If one of the last three is 1,
    the reward is 0.
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
                raise ValueError(f"got '{answer}', whose normal form in DAPO is an empty text")
        elif not NUMBER.fullmatch(answer) and not is_readable(answer):
            raise ValueError(
                f"got '{answer}', in which math-verify finds no expression; expected LaTeX, such as x^2+1 or \\frac{{1}}{{2}}"
            )

    def __init__(self, arguments: MathArguments, context: EnvironmentContext) -> None:
        self.workers = context.workers or 1
        self.limits = JudgeLimits(OWN_SHARE * context.timeout_s, MEMORY_BYTES, SUSPECT_S, KEPT_VARIABLES)
        math_comparison.load()

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge an answer. Raises Unjudged if math-verify cannot parse the expected answer, and any error of sympy."""
        verdict = math_comparison.compare(prompt.task["answer"], text)
        if verdict is None:
            raise Unjudged(f"prompt {prompt.index}: math-verify cannot parse the expected answer {prompt.task['answer']!r}")
        metrics = _metrics(accuracy=verdict.right, unparsed=verdict.unparsed)
        return Outcome(metrics["accuracy"], metrics, extracted=verdict.extracted)

    @override
    def broken(self, how: str) -> Outcome:
        return Outcome(0.0, _metrics(timeout=how == "timeout", crash=how == "crash"))


def _metrics(accuracy: bool = False, timeout: bool = False, crash: bool = False, unparsed: bool = False) -> dict[str, float]:
    return {"accuracy": float(accuracy), "timeout": float(timeout), "crash": float(crash), "unparsed": float(unparsed)}


# ---- expected answers --------------------------------------------------------------------------------------------------------


class _Reader:
    """A child process that reads expected answers with math-verify. Its error messages go to this process's stderr."""

    def __init__(self) -> None:
        variables = python_path.with_package(os.environ)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", math_comparison.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: variables[name] for name in KEPT_VARIABLES if name in variables},
        )
        self._limit_s = START_S  # for the first answer

    def is_expression(self, answer: str) -> bool:
        """Return whether math-verify reads an expression. Raises TimeoutError; OSError or ValueError if the process dies."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(answer).encode() + b"\n")
        self.process.stdin.flush()
        poll = select.poll()  # select does not take descriptors above 1023
        poll.register(self.process.stdout, select.POLLIN)
        limit_s, self._limit_s = self._limit_s, READ_S
        if not poll.poll(1e3 * limit_s):
            raise TimeoutError(f"it did not reply within {limit_s:g} s")
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


_reader_lock = threading.Lock()
_reader: _Reader | None = None  # started for the first expected answer that is not a number; ends with this process


@functools.lru_cache(maxsize=1 << 16)
def is_readable(answer: str) -> bool:
    """Return whether math-verify reads an expression in an expected answer.

    Return True if this machine cannot tell: it lacks the package, as a login node may; it cannot start a process; or it is busy
    and the process needs longer than READ_S. The job then uses the answer as it is.
    """
    global _reader
    if importlib.util.find_spec("math_verify") is None:
        return True
    with _reader_lock:
        for _ in range(2):
            try:
                if _reader is None:
                    _reader = _Reader()
                return _reader.is_expression(answer)
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                logger.warning("could not ask math-verify about the expected answer %r: %s", answer, error)
                if _reader is not None:
                    _reader.kill()
                _reader = None
    return True
