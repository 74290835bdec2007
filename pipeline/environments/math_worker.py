"""The process in which math-verify runs: `python -m pipeline.environments.math_worker PARENT_PID`.

Reads {"expected", "text"} line by line and answers {"right": bool} or {"error": str}; its first line, {}, says that it is
ready. Dies with the thread that started it, even in the midst of an answer. Imports neither torch nor anything else that is
slow to load.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import resource
import sys

from pipeline.sandbox import kernel

MEMORY_BYTES = 4 << 30  # of address space: an answer that needs more is wrong, not the end of the node


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

    logging.disable(logging.WARNING)  # it warns that it has no timeout of its own; the parent has
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        expected = _parse_expected(question["expected"])
        if expected:
            reply = {"right": verify(expected, _parse(question["text"]), timeout_seconds=None)}
        else:
            reply = {"error": f"math-verify can read nothing in the expected answer {question['expected']!r}"}
        print(json.dumps(reply), file=replies, flush=True)


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
