"""The process in which math-verify runs: `python -m pipeline.environments.math_worker PARENT_PID`.

Reads {"expected", "text", "timeout_s"} line by line and answers {"right": bool}, {"timeout": true} or {"crash": true} of the
answer, or {"error": str} of the expected one; its first line, {}, says that it is ready. Each answer is judged in a fork: what
it takes, breaks or leaves behind ends with it, and the next one finds the process as it was. Dies with the thread that started
it, and its fork with it. Imports neither torch nor anything else that is slow to load.
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
from pathlib import Path

from pipeline.sandbox import kernel

MEMORY_BYTES = 4 << 30  # of address space: an answer that needs more is wrong, not the end of the node
RIGHT, WRONG = b"1", b"0"


def main(parent: int) -> None:
    kernel.die_with_parent()
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
    for line in sys.stdin:
        question = json.loads(line)
        expected = _parse_expected(question["expected"])
        if expected:
            reply = _judged(expected, question["text"], question["timeout_s"])
        else:
            reply = {"error": f"math-verify can read nothing in the expected answer {question['expected']!r}"}
        print(json.dumps(reply), file=replies, flush=True)


def _judged(expected: list, text: str, timeout_s: float) -> dict[str, bool]:
    """The reply, once the fork that judged the text has ended."""
    reader, writer = os.pipe()
    worker = os.getpid()
    if not (pid := os.fork()):
        _judge(expected, text, writer, worker)
    os.close(writer)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    ended = poll.poll(1e3 * timeout_s)
    said = os.read(reader, 1) if ended else b""
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if said:
        return {"right": said == RIGHT}
    return {"crash": True} if ended else {"timeout": True}


def _judge(expected: list, text: str, writer: int, worker: int) -> None:
    """Ends the process."""
    try:
        from math_verify import verify

        kernel.die_with_parent()
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # short of memory, the kernel takes this before the worker
        if os.getppid() == worker:
            os.write(writer, RIGHT if verify(expected, _parse(text), timeout_seconds=None) else WRONG)
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
