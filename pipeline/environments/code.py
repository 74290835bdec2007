"""Judge Python programs that the policy writes by running them on the task's tests, in the sandbox.

The answer is the last fenced code block of the text, or the whole text. Each test with input and output has its
own sandbox; Python snippets share a sandbox. An answer can use the names that HARNESS defines, as in the data sets' judges.
`CodeInterpreter` is NeMo-RL's CodeEnvironment: code in several turns, each answered with its result.

Leaves out: other languages; judges for tasks with more than one right output.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from pipeline.environments.code_tests import (
    EqualityTest,
    IOTest,
    Tests,
    parse_tests,
    same_literal,
    same_result,
    same_stdout,
    same_value,
)
from pipeline.environments.environment import BuiltinEnvironment, EnvironmentContext, Outcome, Unjudged
from pipeline.environments.python_tool import ExecutionResult, PythonArguments, PythonSession, PythonTool, SandboxArguments
from pipeline.environments.tool import ToolError
from pipeline.recipe.values import Bool, Text
from pipeline.sandbox.limits import ProgramResult

if TYPE_CHECKING:
    from pipeline.types import Prompt

BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
OWN_SHARE = 0.75
"""Share of `timeout_s` that all tests may take together. The rest covers their starts: a step beyond `timeout_s` is wrong."""
HARNESS = b"""import builtins, sys, types

MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "itertools", "functools",
    "operator", "io", "sys", "json", "typing",
)

def load(name):
    known = {}
    for module in MODULES:
        exec(f"from {module} import *", known)
    for module in MODULES:
        known[module] = sys.modules[module]
    answer = sys.modules[name] = types.ModuleType(name)
    answer.__builtins__ = {**known, **vars(builtins)}
    answer.__file__ = "answer.py"
    exec(compile(open("answer.py", "rb").read(), "answer.py", "exec"), vars(answer))
    return vars(answer)

if __name__ == "__main__":
    load("__main__")
"""
"""Program that runs the answer as a module that its tests may import.

The answer can use everything that LiveCodeBench's judge imports before it, except `statistics`, which is slow to import: the
modules in MODULES, and all names that `import *` from them gives in this order. Starter code (`nums: List[int]`) and many right
answers (`inf`, `deque`) import nothing themselves. These names lie below Python's builtins, so `pow` is the builtin, and they
stay apart from the names that the answer defines.
"""
CALL = b"""import json, os, sys
import harness
arguments = json.loads(sys.stdin.read())
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = harness.load("solution")
function = names.get(sys.argv[1]) or getattr(names["Solution"](), sys.argv[1])
answer.write(json.dumps(function(*arguments)))
answer.close()
"""
"""Program that calls a function of the answer, or a method of its class Solution."""
SNIPPETS = b"""import json, os, sys
import harness
tests = os.fdopen(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
names = harness.load("solution")
request = json.loads(tests.read())

def encode(value):
    if value is None or isinstance(value, (str, bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(value)}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in value.items()]}
    for kind, types in {"list": list, "tuple": tuple, "set": (set, frozenset, type({}.keys()), type({}.items()))}.items():
        if isinstance(value, types):
            return {kind: [encode(one) for one in value]}
    if hasattr(value, "__index__"):
        return encode(value.__index__())
    if value != float(value):
        raise ValueError("a value that JSON cannot encode")
    return float(value)

for number, (snippet, is_equality) in enumerate(request["snippets"]):
    try:
        code = compile(snippet, f"test {number}", "eval" if is_equality else "exec")
        value = json.dumps(encode(eval(code, names)))
    except Exception as error:
        print(f"test {number}: {error!r}", file=sys.stderr)
    else:
        os.write(1, f"\\n{request['mark']} {number} {value}\\n".encode())
"""
"""Program that reports the values of the equalities' expressions, which `same_value` compares, and which other snippets passed.

The mark separates the report from the answer's output. The answer's stdin does not contain the mark, but the memory of its
process does: an answer that searches for it finds it, and can then pass the snippets that are not equalities.
"""
PROGRAMS = {"harness.py": HARNESS, "call.py": CALL, "snippets.py": SNIPPETS}
CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)


@dataclass
class CodeArguments(SandboxArguments):
    """The kwargs of `kind: code`."""

    reward: Literal["all", "share"] = "all"
    """all: 1 if all tests pass, else 0; tests with input and output end at the first failure. share: the share of tests that
    pass."""


class Code(BuiltinEnvironment):
    """Runs the answer on the tests in `prompt.task["answer"]`.

    The sandbox's limits hold for each test, `timeout_s` for a whole answer: tests for which no time is left do not pass.
    Metrics: `accuracy`, 1 if all tests pass; `passed`, the share of tests that pass; `timeouts`, `memory` and `crashes`, the
    shares of tests that end in this way.
    """

    Arguments = CodeArguments
    workers = 4

    def __init__(self, arguments: CodeArguments, context: EnvironmentContext) -> None:
        self._all, self._timeout_s = arguments.reward == "all", OWN_SHARE * context.timeout_s
        self._sandbox = arguments.make_sandbox()

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: Any) -> None:
        parse_tests(answer)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge a program. Raises Unjudged if the task has no tests, or a test that tests nothing."""
        try:
            tests = parse_tests(prompt.task["answer"])
        except ValueError as error:
            raise Unjudged(f"prompt {prompt.index}: {error}") from None
        deadline = time.monotonic() + self._timeout_s
        passed_count, ends = (self._run_cases if tests.cases else self._run_snippets)(code_in(text), tests, deadline)
        share = passed_count / len(tests)
        right, ran = float(passed_count == len(tests)), max(1, ends.total())
        metrics = {"accuracy": right, "passed": share}
        metrics |= {name: ends[name] / ran for name in ("timeouts", "memory", "crashes")}
        return Outcome(right if self._all else share, metrics)

    def _run_cases(self, code: str, tests: Tests, deadline: float) -> tuple[int, Counter[str]]:
        """Return (number of tests that passed, counts: metric of a test's end -> number of tests)."""
        passed_count, ends = 0, Counter[str]()
        for case in tests.cases:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                ends["timeouts"] += 1
                break
            argv = ["call.py", case.function] if case.function else ["harness.py"]
            result = self._run(argv, code, case.input, remaining_s)
            right = _passes(result, case)
            ends[_end_metric(result)] += 1
            passed_count += right
            if self._all and not right:
                break
        return passed_count, ends

    def _run_snippets(self, code: str, tests: Tests, deadline: float) -> tuple[int, Counter[str]]:
        mark = secrets.token_hex(16)
        snippets = [(test.expression, True) if isinstance(test, EqualityTest) else (test, False) for test in tests.snippets]
        request = json.dumps({"snippets": snippets, "mark": mark})
        result = self._run(["snippets.py"], code, request, deadline - time.monotonic())
        values: dict[str, str] = {}
        for line in result.stdout.decode(errors="replace").splitlines():
            prefix, _, report = line.partition(" ")
            if prefix == mark:
                number, _, values[number] = report.partition(" ")
        verdicts = [
            str(number) in values and (not isinstance(test, EqualityTest) or same_value(values[str(number)], test.value))
            for number, test in enumerate(tests.snippets)
        ]
        return sum(verdicts), Counter([_end_metric(result)])

    def _run(self, argv: list[str], code: str, stdin: str, remaining_s: float) -> ProgramResult:
        files = {"answer.py": code.encode(errors="replace"), **PROGRAMS}
        wall_s = min(self._sandbox.limits.wall_s, remaining_s)
        return self._sandbox.run([self._sandbox.python, *argv], files, stdin.encode(errors="replace"), wall_s)


def code_in(text: str) -> str:
    """Return the last fenced code block of a text, or the whole text."""
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _passes(result: ProgramResult, case: IOTest) -> bool:
    are_equal = same_result if case.function else same_stdout
    return result.status == 0 and are_equal(result.stdout.decode(errors="replace"), case.output)


def _end_metric(result: ProgramResult) -> str:
    """Return the name of the metric that counts the way in which the program ended."""
    if result.ended_by in ("wall time", "cpu time"):
        return "timeouts"
    if result.ended_by == "memory" or (
        result.status and result.stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError")
    ):
        return "memory"
    return "crashes" if result.status else "ended"


@dataclass
class CodeInterpreterArguments(PythonArguments):
    """The kwargs of `kind: code_interpreter`."""

    terminate_on_evaluation: Bool = True
    """End the episode with the first code that ends in an expression, as NeMo-RL does."""
    role: Text = "user"
    """Role of the message with the result."""


class CodeInterpreter(BuiltinEnvironment):
    """Runs the last `<code>...</code>` of a turn and replies with `<result>...</result>`; variables persist between turns.

    A turn without code ends the episode. The reward is 1 if the value of the episode's last expression equals
    `prompt.task["answer"]` as `same_literal` compares them, else 0 (NeMo-RL's is always 0). `timeout_s` is for one turn.
    Metrics: `accuracy`; `errors`, 1 if the last code raised an exception.
    """

    Arguments = CodeInterpreterArguments
    is_final = False
    workers = 16

    def __init__(self, arguments: CodeInterpreterArguments, context: EnvironmentContext) -> None:
        self._terminates, self._role = arguments.terminate_on_evaluation, arguments.role
        self._timeout_s, self._tool = OWN_SHARE * context.timeout_s, PythonTool(arguments)

    @override
    def reset(self, prompt: Prompt) -> CodeEpisode:
        return CodeEpisode(self._tool.open(), str(prompt.task["answer"]).strip())

    @override
    def step(self, episode: CodeEpisode, text: str) -> Outcome:
        # Search only up to the last </code>: the pattern would scan the rest of the text for each <code>.
        codes = CODE.findall(text[: text.rfind("</code>") + len("</code>")])
        if not codes:
            return replace(self._end(episode), malformed="<code>" in text)
        executed = _execute(episode.session, codes[-1], self._timeout_s)
        episode.failed = executed.error is not None
        if executed.value is not None:
            episode.value = executed.value
            if self._terminates:
                return self._end(episode)
        value = executed.value if executed.value not in (None, "None") else ""
        result = executed.printed + (executed.error or value)
        multiline = "\n" in codes[-1] or "\n" in result
        content = f"\n\n<result>\n{result}\n</result>" if multiline else f"<result>{result}</result>"
        return Outcome(0.0, episode.metrics(), {"role": self._role, "content": content})

    def _end(self, episode: CodeEpisode) -> Outcome:
        episode.session.close()
        metrics = episode.metrics()
        return Outcome(metrics["accuracy"], metrics)


@dataclass
class CodeEpisode:
    """The state of one episode."""

    session: PythonSession
    answer: str
    value: str = ""  # of the last expression so far
    failed: bool = False  # whether the last code raised

    def metrics(self) -> dict[str, float]:
        """Return the metrics `accuracy` and `errors` of the episode so far."""
        return {"accuracy": float(same_literal(self.value, self.answer)), "errors": float(self.failed)}


def _execute(session: PythonSession, code: str, timeout_s: float) -> ExecutionResult:
    """Run code and return its result. An error of the interpreter is returned as the result's error."""
    try:
        return session.execute(code, timeout_s)
    except (ToolError, TimeoutError) as error:
        return ExecutionResult("", None, f"error: {error}")
