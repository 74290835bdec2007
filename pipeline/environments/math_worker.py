"""The process that runs math-verify: `python -m pipeline.environments.math_worker PARENT_PID`.

Reads lines {"expected", "text", "timeout_s"}. Replies {"right": bool, "unparsed": bool, "extracted": str}, {"timeout": true} or
{"crash": true} for the answer, or {"error": str} for an expected answer without content; a first line {} announces that it is
ready. A line without "text" asks whether the expected answer is an expression to math-verify: {"right": bool, ...}.

An expected answer is read as LaTeX only, as NeMo-RL reads it. math-verify's other reading takes the last number of what is not
LaTeX, so that 1 would be right for `x**2 + 1`. If LaTeX gives no expression, only an answer that repeats the text is right.

A fork judges answers. It is replaced after an answer that fails or takes longer than SUSPECT_S, so whatever such an
answer breaks or leaves behind ends with the fork. The worker ends with the thread that started it, and its fork with the
worker. It imports neither torch nor anything else that loads slowly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import re
import resource
import select
import signal
import sys
import time

from pipeline.sandbox import linux

MEMORY_BYTES = 4 << 30  # address space; an answer that needs more is wrong
SUSPECT_S = 0.1  # a right answer takes milliseconds, as does a fork
RIGHT, WRONG, NOTHING_FOUND, BAD_EXPECTED = b"1", b"0", b"-", b"?"
FORMULA = re.compile(r"(?<![\\\d])(?:\$\$[^$]+\$\$|\$[^$]+\$)|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
NUMBER_AND_PERIOD = re.compile(r"\s*(\\?\$?\s*-?[\d,./]*\d)\.\s*")
UPRIGHT = re.compile(r"\\(?:mathrm|mathit|operatorname|textrm|text)\s*\{\s*([ei])\s*\}")
r"""e and i in upright letters. math-verify takes a trailing \mathrm{i} for a unit, so that 1 + 2\mathrm{i} would be 3."""
EXTRACTED_BYTES = 500  # of the answer that math-verify found, written after RIGHT or WRONG; a pipe writes them at once


def main(parent: int) -> None:
    """Judge requests from stdin until it ends. parent: process id of the environment."""
    linux.die_with_parent()
    if os.getppid() != parent:  # the parent ended before that call
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard), hard))
    # Output of libraries must not mix with the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from math_verify import verify

    logging.disable(logging.WARNING)  # math-verify warns without a timeout of its own; this process has one
    verify(
        _parse_expected("\\frac{1}{2}"), _parse("\\boxed{0.5}"), timeout_seconds=None
    )  # loads lazily imported modules once, before forking
    gc.freeze()  # else the first garbage collection in a fork copies all memory
    print("{}", file=replies, flush=True)
    fork: _Fork | None = None
    for line in sys.stdin:
        request, fresh, begun = json.loads(line), fork is None, time.monotonic()
        fork = fork or _Fork()
        verdict = fork.judge(line, request["timeout_s"])
        if verdict in (b"", BAD_EXPECTED) and not fresh:  # an earlier answer may be the cause
            fork.end()
            fork = _Fork()
            verdict = fork.judge(line, max(0.0, begun + request["timeout_s"] - time.monotonic()))
        if verdict and verdict[:1] in (RIGHT, WRONG, NOTHING_FOUND):
            extracted = verdict[1:].decode(errors="replace")
            reply = {"right": verdict[:1] == RIGHT, "unparsed": verdict == NOTHING_FOUND, "extracted": extracted}
        elif verdict == BAD_EXPECTED:
            reply = {"error": f"math-verify cannot parse the expected answer {request['expected']!r}"}
        else:
            reply = {"timeout": True} if verdict is None else {"crash": True}
        if "right" not in reply or time.monotonic() > begun + SUSPECT_S:
            fork.end()
            fork = None
        print(json.dumps(reply), file=replies, flush=True)


class _Fork:
    """A fork of this process that judges answers."""

    def __init__(self) -> None:
        requests_reader, self._requests = os.pipe()
        self._verdicts, verdicts_writer = os.pipe()
        worker = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._requests)
            _judge(requests_reader, verdicts_writer, worker)
        os.close(requests_reader)
        os.close(verdicts_writer)
        self._poll = select.poll()
        self._poll.register(self._verdicts, select.POLLIN)

    def judge(self, line: str, timeout_s: float) -> bytes | None:
        """Return RIGHT or WRONG with the answer found, NOTHING_FOUND or BAD_EXPECTED.

        b"" if the fork has ended, None if it exceeds its time.
        """
        try:
            left = line.encode()
            while left:
                left = left[os.write(self._requests, left) :]
        except BrokenPipeError:
            return b""
        return os.read(self._verdicts, 1 + EXTRACTED_BYTES) if self._poll.poll(1e3 * timeout_s) else None

    def end(self) -> None:
        """Kill the fork and reap it."""
        os.close(self._requests)
        os.close(self._verdicts)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _judge(requests: int, verdicts: int, worker: int) -> None:
    """Judge answers in the fork until it ends; never returns."""
    try:
        from math_verify import verify

        linux.die_with_parent()
        with contextlib.suppress(OSError):
            linux.raise_oom_score(1000)  # before the worker
        if os.getppid() != worker:
            return
        for line in os.fdopen(requests):
            request = json.loads(line)
            expected = _parse_expected(request["expected"])
            if "text" not in request:
                os.write(verdicts, RIGHT if _is_expression(expected) else WRONG)
            elif not expected:
                os.write(verdicts, BAD_EXPECTED)
            elif found := _parse(request["text"]):
                right = verify(expected, found, timeout_seconds=None)
                right = right and (_is_expression(expected) or _repeats(request["text"], request["expected"]))
                os.write(verdicts, (RIGHT if right else WRONG) + _extracted(found))
            else:
                os.write(verdicts, NOTHING_FOUND)
    finally:
        os._exit(0)  # no traceback of errors that an answer causes


def _parse(text: str, only_latex: bool = False) -> list:
    """Return the expressions of a text, and the last one's text at the end; [] without any."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    forms = (LatexExtractionConfig(),) if only_latex else (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(UPRIGHT.sub(_slanted, text), forms, parsing_timeout=None)  # pyright: ignore[reportArgumentType] None: no timeout


def _slanted(upright: re.Match[str]) -> str:
    r"""Return the letter, apart from a command before it: \pi\mathrm{i} is \pi i."""
    return " " * upright.string[max(upright.start() - 1, 0) : upright.start()].isalpha() + upright[1]


def _extracted(found: list) -> bytes:
    """Return the text of the answer that was found, without spaces."""
    return "".join(str(found[-1]).split()).encode(errors="replace")[:EXTRACTED_BYTES] if isinstance(found[-1], str) else b""


@functools.lru_cache(maxsize=1024)
def _parse_expected(text: str) -> list:
    r"""Parse an expected answer: a formula, one in a sentence, or bare LaTeX (\frac{1}{2}), which is read inside a box.

    Several formulas are read as one, as NeMo-RL does: none of them alone is the answer.
    """
    if not text.strip():
        return []
    if number := NUMBER_AND_PERIOD.fullmatch(text):  # LaTeX reads no number in `42.`
        text = number[1]
    begins = [text, f"\\boxed{{{text}}}"] if _names_its_formula(text) else [f"\\boxed{{{text}}}"]
    readings = [reading for begin in begins if (reading := _parse(begin, only_latex=True))]
    return next(filter(_is_expression, readings), readings[0] if readings else [])


def _names_its_formula(text: str) -> bool:
    """Return whether a text has a box, or one formula and no number besides it. A price has a dollar sign and no formula."""
    if "\\boxed" in text:
        return True
    return len(FORMULA.findall(text)) == 1 and not re.search(r"\d", FORMULA.sub("", text))


def _is_expression(parsed: list) -> bool:
    return any(not isinstance(one, str) for one in parsed)


def _repeats(text: str, expected: str) -> bool:
    """Return whether the last box of a text, or the text without one, repeats the expected answer but for spaces.

    math-verify may compare the beginnings of texts that it cannot read.
    """
    wanted, said = (re.sub(r"[\s$]", "", one) for one in (expected, text[max(text.rfind("\\boxed"), 0) :]))
    return wanted.removeprefix("\\boxed{").removesuffix("}") in said


if __name__ == "__main__":
    main(int(sys.argv[1]))
