"""Judge answers to tasks of code benchmarks: HumanEval, MBPP, their plus versions, LiveCodeBench.

`prompt.task`: "answer", the tests in a form below; "style" and "given", the style and the prompt's code for
`code_extraction.py`.

    {"program": ..., "setup": ..., "entry_point": ...}     a Python program that calls the answer's functions and raises
        if a result is wrong. setup: code that runs first; the answer's function replaces the `entry_point` that it defines.
    {"tests": [...], "private": ..., "function": ...}      LiveCodeBench's inputs and outputs. private: further tests, encoded.
        function: the answer's function that gets the inputs; empty: the answer is a program that reads stdin.

Answer and tests run in two sandboxes (`code_process.py`), and this process passes calls and values from one to the other. So
nothing that an answer does to its own process makes it pass: it may exit early, print that it passed, replace `assert`, or kill
its parent. Its process has neither tests nor a checker, and sees the arguments of one call at a time.

Differences to the benchmarks' own judges: arguments and results are copies, so a test does not see what a function does to its
arguments; time limits are of wall time of one call or program, and of CPU time of all; LiveCodeBench's functions that return a
tuple inside a list do not equal a list.
Leaves out: tests that pass functions, or objects of the tests' own classes, to the answer. Such a task is not judged.
"""

from __future__ import annotations

import base64
import binascii
import json
import signal
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from pickletools import genops
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import override

from pipeline.environments import code_process
from pipeline.environments.code import HARNESS, OWN_SHARE
from pipeline.environments.code_extraction import find_code
from pipeline.environments.code_process import LENGTH, VERDICT
from pipeline.environments.code_tests import same_stdout, same_value
from pipeline.environments.environment import BuiltinEnvironment, EnvironmentContext, Outcome, Unjudged
from pipeline.environments.numpy_stand_in import can_stand_in
from pipeline.environments.python_tool import SandboxArguments
from pipeline.recipe.values import Float
from pipeline.sandbox.guard_client import InteractiveProgram

if TYPE_CHECKING:
    from pipeline.types import Prompt

FOLDER = Path(__file__).parent
PROCESS, NUMPY = (FOLDER / "code_process.py").read_bytes(), (FOLDER / "numpy_stand_in.py").read_bytes()
ENDS = {"wall time": "timeouts", "cpu time": "timeouts", "memory": "memory"}
"""Cause of a program's end -> metric that counts it."""
DECODED_BYTES = 1 << 30
"""Largest size of a task's private tests."""
PLAIN_PICKLE = {
    *("PROTO", "FRAME", "STOP", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"),
}
"""Opcodes of a pickle of a single text. No other opcode is allowed, so reading a pickle runs no code."""


@dataclass
class CodeBenchmarkArguments(SandboxArguments):
    """The kwargs of `kind: code_benchmark`."""

    test_s: Annotated[
        Float,
        Field(gt=0, description="Maximum wall time, in seconds, of a test with input and output and of its program's start."),
    ] = 6.0


@dataclass(frozen=True, slots=True)
class TestsResult:
    """The result of an answer's tests."""

    passed: bool
    ended_by: str = ""  # the metric of the cause: "timeouts", "memory", "crashes"


class CodeBenchmark(BuiltinEnvironment):
    """Rewards an answer that passes all tests with 1, else 0. The first test that fails ends the tests.

    `timeout_s` and `wall_s` are for one answer. Metrics: `accuracy`; `unparsed`, 1 if the text has no code; `timeouts`,
    `memory` and `crashes`, 1 if the answer's program ended in this way.
    """

    Arguments = CodeBenchmarkArguments
    workers = 4

    def __init__(self, arguments: CodeBenchmarkArguments, context: EnvironmentContext) -> None:
        self._sandbox, self._test_s = arguments.make_sandbox(), arguments.test_s
        self._seconds = min(arguments.wall_s, OWN_SHARE * context.timeout_s)

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: Any) -> None:
        _parse(answer)

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge an answer. Raises Unjudged if its tests cannot run."""
        task = prompt.task
        try:
            tests = _parse(task["answer"])
            cases = None if "program" in tests else read_cases(tests)
        except ValueError as error:
            raise Unjudged(f"prompt {prompt.index}: {error}") from None
        name = tests.get("entry_point") or tests.get("function") or ""
        code = find_code(text, task.get("style", "blocks"), name, task.get("given", ""))
        if code is None:
            verdict = TestsResult(False)
        else:
            deadline = time.monotonic() + self._seconds
            try:
                verdict = self._run_cases(code, tests, cases, deadline) if cases else self._run_program(code, tests, deadline)
            except code_process.BrokenTests as error:
                raise Unjudged(f"prompt {prompt.index}: {error}") from None
        metrics = {"accuracy": float(verdict.passed), "unparsed": float(code is None)}
        metrics |= {end: float(verdict.ended_by == end) for end in ("timeouts", "memory", "crashes")}
        return Outcome(metrics["accuracy"], metrics)

    def _run_cases(self, code: str, tests: dict[str, Any], cases: list[dict[str, str]], deadline: float) -> TestsResult:
        function = tests.get("function", "")
        with _Program(self._answer(code, "imports"), self._sandbox.limits.output_bytes) as answer:
            try:
                if function:
                    answer.ask({"op": "load"}, min(deadline, time.monotonic() + self._test_s))
                for case in cases:
                    limit = min(deadline, time.monotonic() + self._test_s)
                    if function:
                        arguments = [json.loads(line) for line in case["input"].split("\n") if line.strip()]
                        encoded = code_process.encode(arguments, _no_number)
                        request = {"op": "call", "target": function, "arguments": encoded, "named": {"dict": []}}
                        is_right = same_result(answer.ask(request, limit), json.loads(case["output"]))
                    else:
                        status, printed = answer.ask({"op": "run", "target": case["input"]}, limit)["list"]
                        is_right = status == 0 and isinstance(printed, str) and same_stdout(printed, case["output"])
                        if status != 0:
                            return TestsResult(False, "timeouts" if status == -signal.SIGXCPU else "crashes")
                    if not is_right:
                        return TestsResult(False)
            except _Wrong as error:
                return TestsResult(False, answer.cause(error))
            except (TypeError, ValueError, KeyError, RecursionError):
                return TestsResult(False, "crashes")  # a malformed reply
        return TestsResult(True)

    def _run_program(self, code: str, tests: dict[str, Any], deadline: float) -> TestsResult:
        limit = self._sandbox.limits.output_bytes
        with _Program(self._answer(code, "bare"), limit) as answer, _Program(self._judge(tests["program"]), 1 << 30) as judge:
            try:
                judge.send(json.dumps(tests).encode(), deadline)
                while True:
                    frame = judge.receive(deadline)
                    if frame[:1] == VERDICT:
                        break
                    answer.send(frame[1:], deadline)
                    judge.send(answer.receive(deadline), deadline)
            except _Wrong as error:
                return TestsResult(False, answer.cause(error))
        verdict = json.loads(frame[1:])
        if "broken" in verdict:
            raise code_process.BrokenTests(verdict["broken"])
        return TestsResult(verdict["passed"])

    def _answer(self, code: str, names: str) -> InteractiveProgram:
        files = {"answer.py": code.encode(errors="replace"), "code_process.py": PROCESS, "harness.py": HARNESS}
        return self._sandbox.start([self._sandbox.python, "code_process.py", "serve", names], files, self._seconds)

    def _judge(self, program: str) -> InteractiveProgram:
        files = {"code_process.py": PROCESS, **({"numpy.py": NUMPY} if can_stand_in(program) else {})}
        return self._sandbox.start([self._sandbox.python, "code_process.py", "judge"], files, self._seconds)


class _Wrong(Exception):
    """Raised if the answer failed: it raised an exception, ended, took too long, or sent a malformed reply."""


class _Program:
    """A running program of `code_process.py` that exchanges frames with this process. frame_limit: maximum bytes of a frame."""

    def __init__(self, program: InteractiveProgram, frame_limit: int) -> None:
        self._program, self._frame_limit = program, frame_limit

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *error: object) -> None:
        self._program.close()

    def cause(self, error: _Wrong) -> str:
        """End the program and return the metric that its failure counts in. error: the failure."""
        ended_by = self._program.close()
        if isinstance(error.__cause__, TimeoutError):
            return "timeouts"
        return ENDS.get(ended_by, "crashes")

    def ask(self, request: dict[str, Any], deadline: float) -> Any:
        """Send a request and return its encoded value. Raises _Wrong if the reply is an error."""
        self.send(json.dumps(request).encode(errors="surrogatepass"), deadline)
        try:
            reply = json.loads(self.receive(deadline))
            return reply["value"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _Wrong("an error") from error

    def send(self, content: bytes, deadline: float) -> None:
        """Send a frame."""
        try:
            self._program.send(LENGTH.pack(len(content)) + content, deadline)
        except (EOFError, TimeoutError) as error:
            raise _Wrong(str(error)) from error

    def receive(self, deadline: float) -> bytes:
        """Return the next frame."""
        try:
            (size,) = LENGTH.unpack(self._program.receive(LENGTH.size, deadline))
            if size > self._frame_limit:
                raise _Wrong(f"a frame of {size} bytes")
            return self._program.receive(size, deadline)
        except (EOFError, TimeoutError) as error:
            raise _Wrong(str(error)) from error


# ---- tests -------------------------------------------------------------------------------------------------------------------


def _parse(answer: str) -> dict[str, Any]:
    """Return the tests in a task's "answer". Raises ValueError for a text that has neither of the module's two forms."""
    tests = json.loads(answer)
    if not isinstance(tests, dict) or not ({"program", "setup", "entry_point"} <= set(tests) or "tests" in tests):
        raise ValueError("got tests in an unknown form; expected JSON with the keys program, setup and entry_point, or tests")
    return tests


def read_cases(tests: dict[str, Any]) -> list[dict[str, str]]:
    """Return the public and private tests of a LiveCodeBench task, as {"input", "output", "testtype"}.

    Raises ValueError if they cannot be read, or if the task has none.
    """
    cases = [*tests["tests"], *decode_private(tests.get("private") or "[]")]
    if not cases or not all(isinstance(case, dict) and {"input", "output"} <= set(case) for case in cases):
        raise ValueError("got no tests, or a test without input or output; expected a list of {input, output}")
    return cases


def decode_private(text: str) -> list[dict[str, str]]:
    """Return the private tests in a text, which is JSON or, as on the Hub, base64 of zlib of a pickle of a JSON text.

    The pickle must hold a single text. Raises ValueError for any other pickle, and for other data.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, validate=True), DECODED_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"the private tests have more than {DECODED_BYTES} bytes after decompression")
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the private tests are neither JSON nor base64 of zlib data: {error}") from error
    return json.loads(_text_of_pickle(content))


def _text_of_pickle(content: bytes) -> str:
    texts = []
    for opcode, argument, _ in genops(content):
        if opcode.name not in PLAIN_PICKLE:
            raise ValueError(f"the private tests are a pickle with the opcode {opcode.name}; expected a pickle of a string")
        if isinstance(argument, str):
            texts.append(argument)
    if len(texts) != 1:
        raise ValueError(f"the private tests are a pickle of {len(texts)} texts; expected a pickle of one text")
    return texts[0]


def same_result(encoded: Any, expected: Any) -> bool:
    """Return whether an encoded result equals a value of JSON. A result that is a tuple equals a list."""
    if isinstance(encoded, dict) and set(encoded) == {"tuple"}:
        encoded = {"list": encoded["tuple"]}
    return same_value(json.dumps(encoded), expected)


def _no_number(value: Any) -> int:
    raise code_process.NotPlain(f"a value of type {type(value).__name__} in a test")
