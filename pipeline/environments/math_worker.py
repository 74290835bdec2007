"""The process in which math-verify runs: `python -m pipeline.environments.math_worker PARENT_PID`.

Reads {"expected", "text", "timeout_s"} line by line and answers {"right": bool}, {"timeout": true} or {"crash": true} of the
answer, or {"error": str} of the expected one; its first line, {}, says that it is ready. Answers are judged in a fork, which
ends with one that it fails at or that takes longer than SUSPECT_S: what such an answer takes, breaks or leaves behind ends with
it, and the next one finds a fresh fork. Dies with the thread that started it, and its fork with it. Imports neither torch nor
anything else that is slow to load.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import resource
import select
import signal
import sys
import time

from pipeline.sandbox import linux

MEMORY_BYTES = 4 << 30  # of address space: an answer that needs more is wrong, not the end of the node
SUSPECT_S = 0.1  # a right answer takes milliseconds, and so does a fork
RIGHT, WRONG, UNREAD = b"1", b"0", b"?"


def main(parent: int) -> None:
    linux.die_with_parent()
    if os.getppid() != parent:  # it died before it could be said
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard), hard))
    # Whatever a library prints must not come between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from math_verify import verify

    logging.disable(logging.WARNING)  # it warns that it has no timeout of its own; this has
    verify(_parse_expected("\\frac{1}{2}"), _parse("\\boxed{0.5}"), timeout_seconds=None)  # loads what forks would load each
    gc.freeze()  # else a fork's first collection copies all that is loaded
    print("{}", file=replies, flush=True)
    fork: _Fork | None = None
    for line in sys.stdin:
        question, fresh, begun = json.loads(line), fork is None, time.monotonic()
        fork = fork or _Fork()
        said = fork.judge(line, question["timeout_s"])
        if said in (b"", UNREAD) and not fresh:  # it may be an earlier answer's doing
            fork.end()
            fork = _Fork()
            said = fork.judge(line, max(0.0, begun + question["timeout_s"] - time.monotonic()))
        if said in (RIGHT, WRONG):
            reply = {"right": said == RIGHT}
        elif said == UNREAD:
            reply = {"error": f"math-verify can read nothing in the expected answer {question['expected']!r}"}
        else:
            reply = {"timeout": True} if said is None else {"crash": True}
        if "right" not in reply or time.monotonic() > begun + SUSPECT_S:
            fork.end()
            fork = None
        print(json.dumps(reply), file=replies, flush=True)


class _Fork:
    """A fork of this process that judges answers."""

    def __init__(self) -> None:
        its_questions, self._questions = os.pipe()
        self._said, its_said = os.pipe()
        worker = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._questions)
            _judge(its_questions, its_said, worker)
        os.close(its_questions)
        os.close(its_said)
        self._poll = select.poll()
        self._poll.register(self._said, select.POLLIN)

    def judge(self, line: str, timeout_s: float) -> bytes | None:
        """RIGHT, WRONG or UNREAD; b"" if it has ended, None if it says nothing in time."""
        try:
            left = line.encode()
            while left:
                left = left[os.write(self._questions, left) :]
        except BrokenPipeError:
            return b""
        return os.read(self._said, 1) if self._poll.poll(1e3 * timeout_s) else None

    def end(self) -> None:
        os.close(self._questions)
        os.close(self._said)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _judge(questions: int, said: int, worker: int) -> None:
    """A fork's whole life."""
    try:
        from math_verify import verify

        linux.die_with_parent()
        with contextlib.suppress(OSError):
            linux.raise_oom_score(1000)  # before the worker
        if os.getppid() != worker:
            return
        for line in os.fdopen(questions):
            question = json.loads(line)
            expected = _parse_expected(question["expected"])
            right = verify(expected, _parse(question["text"]), timeout_seconds=None) if expected else None
            os.write(said, UNREAD if right is None else RIGHT if right else WRONG)
    finally:
        os._exit(0)  # without a traceback of what an answer raised


def _parse(text: str) -> list:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


@functools.lru_cache(maxsize=1024)
def _parse_expected(text: str) -> list:
    """Data sets give bare LaTeX (\\frac{1}{2}), which math-verify reads only inside a formula; some give the formula."""
    if not text.strip():
        return []
    formula = _parse(text) if "$" in text or "\\boxed" in text or "\\(" in text else []
    return formula or _parse(f"\\boxed{{{text}}}")  # \$18 has a dollar sign, and is no formula


if __name__ == "__main__":
    main(int(sys.argv[1]))
