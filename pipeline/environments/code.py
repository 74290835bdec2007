"""Programs in Python that the policy writes, judged by running them on the task's tests, in the sandbox.

The answer is the text's last fenced block of code, or the whole text. Each case runs in a sandbox of its own; pieces of Python
run in one. An answer finds the names that HARNESS says, as data sets' own judges have them. `CodeInterpreter` is NeMo-RL's
CodeEnvironment: code in several turns, each answered with what it came to.

Leaves out: other languages; judges for tasks with more than one right output.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.environments.base import BuiltinEnvironment, EnvironmentContext, Outcome, Unjudged
from pipeline.environments.code_tests import (
    EqualityTest,
    IOTest,
    Tests,
    parse_tests,
    same_literal,
    same_output,
    same_result,
    same_value,
)
from pipeline.environments.python_tool import ExecutionResult, PythonArguments, PythonSession, PythonTool, SandboxArguments
from pipeline.environments.tool import ToolError
from pipeline.sandbox.limits import ProgramResult
from pipeline.values import Bool, Text

if TYPE_CHECKING:
    from pipeline.types import Prompt

BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
OWN_SHARE = 0.75
"""The share of `timeout_s` that tests may take together. The rest is for their starts: a step that outlasts it is wrong."""
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
"""Executes the answer, as a module that its tests may import.

It finds all that LiveCodeBench's judge imports before it, but for `statistics`, which takes long: MODULES, and what `import *`
gives of them in this order. Starter code (`nums: List[int]`) and many right answers (`inf`, `deque`) go without imports. They
come below Python's builtins, so that `pow` is Python's, and what the answer itself defines can be told from them.
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
"""Calls a function, of the module or of a class Solution."""
PIECES = b"""import json, os, sys
import harness
tests = os.fdopen(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
names = harness.load("solution")
asked = json.loads(tests.read())

def told(value):
    if value is None or isinstance(value, (str, bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(value)}
    if isinstance(value, dict):
        return {"dict": [[told(key), told(one)] for key, one in value.items()]}
    for kind, types in {"list": list, "tuple": tuple, "set": (set, frozenset, type({}.keys()), type({}.items()))}.items():
        if isinstance(value, types):
            return {kind: [told(one) for one in value]}
    if hasattr(value, "__index__"):
        return told(value.__index__())
    if value != float(value):
        raise ValueError("a value that JSON cannot tell")
    return float(value)

for number, (piece, equation) in enumerate(asked["pieces"]):
    try:
        code = compile(piece, f"test {number}", "eval" if equation else "exec")
        value = json.dumps(told(eval(code, names)))
    except Exception as error:
        print(f"test {number}: {error!r}", file=sys.stderr)
    else:
        os.write(1, f"\\n{asked['mark']} {number} {value}\\n".encode())
"""
"""Tells what the equations' expressions come to, for `same_value` to judge, and which other pieces did not raise.

The mark keeps this apart from what the answer prints. It is not on the answer's stdin, but in its process: an answer that looks
for it finds it, and has passed the pieces that are no equations.
"""
PROGRAMS = {"harness.py": HARNESS, "call.py": CALL, "pieces.py": PIECES}
CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)


@dataclass
class CodeArguments(SandboxArguments):
    reward: Annotated[
        Literal["all", "share"],
        Field(description="all: 1 if all tests pass, so that the first that fails is the last run. share: of those that pass."),
    ] = "all"


class Code(BuiltinEnvironment):
    """Limits are for each test, `timeout_s` for one answer: tests for which no time is left count as not passed.

    Metrics: `accuracy`, 1 if all passed; `passed`, the share; and of the tests that ran the shares that ended by `timeouts`,
    `memory` and `crashes` (of any other kind).
    """

    Arguments = CodeArguments
    workers = 4

    def __init__(self, arguments: CodeArguments, context: EnvironmentContext) -> None:
        self._all, self._timeout_s = arguments.reward == "all", OWN_SHARE * context.timeout_s
        self._sandbox = arguments.make_sandbox()

    @classmethod
    def check_answer(cls, answer: str) -> None:
        parse_tests(answer)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Raises Unjudged if the task has no tests, or one that tests nothing."""
        try:
            tests = parse_tests(prompt.task["answer"])
        except ValueError as error:
            raise Unjudged(f"prompt {prompt.index}: {error}") from None
        deadline = time.monotonic() + self._timeout_s
        passed, ends = (self._cases if tests.cases else self._pieces)(code_in(text), tests, deadline)
        share = passed / len(tests)
        right, ran = float(passed == len(tests)), max(1, ends.total())
        metrics = {"accuracy": right, "passed": share}
        metrics |= {name: ends[name] / ran for name in ("timeouts", "memory", "crashes")}
        return Outcome(right if self._all else share, metrics)

    def _cases(self, code: str, tests: Tests, deadline: float) -> tuple[int, Counter[str]]:
        """Return how many passed, and how those that ran ended."""
        passed, ends = 0, Counter()
        for case in tests.cases:
            if (left := deadline - time.monotonic()) <= 0:
                ends["timeouts"] += 1
                break
            argv = ["call.py", case.function] if case.function else ["harness.py"]
            ran = self._run(argv, code, case.input, left)
            right = _passes(ran, case)
            ends[_end(ran)] += 1
            passed += right
            if self._all and not right:
                break
        return passed, ends

    def _pieces(self, code: str, tests: Tests, deadline: float) -> tuple[int, Counter[str]]:
        mark = secrets.token_hex(16)
        pieces = [(piece.expression, True) if isinstance(piece, EqualityTest) else (piece, False) for piece in tests.pieces]
        asked = json.dumps({"pieces": pieces, "mark": mark})
        ran = self._run(["pieces.py"], code, asked, deadline - time.monotonic())
        told = {}
        for line in ran.stdout.decode(errors="replace").splitlines():
            marked, _, rest = line.partition(" ")
            if marked == mark:
                number, _, told[number] = rest.partition(" ")
        passed = [
            str(number) in told and (not isinstance(piece, EqualityTest) or same_value(told[str(number)], piece.value))
            for number, piece in enumerate(tests.pieces)
        ]
        return sum(passed), Counter([_end(ran)])

    def _run(self, argv: list[str], code: str, stdin: str, left: float) -> ProgramResult:
        files = {"answer.py": code.encode(errors="replace"), **PROGRAMS}
        wall_s = min(self._sandbox.limits.wall_s, left)
        return self._sandbox.run([self._sandbox.python, *argv], files, stdin.encode(errors="replace"), wall_s)


def code_in(text: str) -> str:
    """Return the last fenced block of a text, or all of it."""
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _passes(ran: ProgramResult, case: IOTest) -> bool:
    same = same_result if case.function else same_output
    return ran.status == 0 and same(ran.stdout.decode(errors="replace"), case.output)


def _end(ran: ProgramResult) -> str:
    """Return the metric that counts how a program ended."""
    if ran.ended_by in ("wall time", "cpu time"):
        return "timeouts"
    if ran.ended_by == "memory" or (ran.status and ran.stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError")):
        return "memory"
    return "crashes" if ran.status else "ended"


@dataclass
class CodeInterpreterArguments(PythonArguments):
    terminate_on_evaluation: Annotated[
        Bool, Field(description="End the episode with the first code whose last line is an expression, as NeMo-RL does.")
    ] = True
    role: Annotated[Text, Field(description="Role of the message with the result.")] = "user"


class CodeInterpreter(BuiltinEnvironment):
    """The last `<code>...</code>` of a turn is run; what it comes to is told as `<result>...</result>`, and names stay.

    The episode also ends with a turn without code. Reward 1 if the value of the episode's last expression reads as
    `prompt.task["answer"]`, else 0 (NeMo-RL's is always 0): see `same_literal`. `timeout_s` is for one turn. Metrics:
    `accuracy`; `errors`, 1 if the last code raised.
    """

    Arguments = CodeInterpreterArguments
    is_final = False
    workers = 16

    def __init__(self, arguments: CodeInterpreterArguments, context: EnvironmentContext) -> None:
        self._terminates, self._role = arguments.terminate_on_evaluation, arguments.role
        self._timeout_s, self._tool = OWN_SHARE * context.timeout_s, PythonTool(arguments)

    def reset(self, prompt: Prompt) -> CodeEpisode:
        return CodeEpisode(self._tool.open(), str(prompt.task["answer"]).strip())

    def step(self, episode: CodeEpisode, text: str) -> Outcome:
        codes = CODE.findall(text[: text.rfind("</code>") + len("</code>")])  # no search beyond, which would be for each <code>
        if not codes:
            return self._over(episode)
        executed = _execute(episode.session, codes[-1], self._timeout_s)
        episode.failed = executed.error is not None
        if executed.value is not None:
            episode.value = executed.value
            if self._terminates:
                return self._over(episode)
        told = executed.printed + (executed.error or (executed.value if executed.value not in (None, "None") else ""))
        long = "\n" in codes[-1] or "\n" in told
        content = f"\n\n<result>\n{told}\n</result>" if long else f"<result>{told}</result>"
        return Outcome(0.0, episode.metrics(), {"role": self._role, "content": content})

    def _over(self, episode: CodeEpisode) -> Outcome:
        episode.session.close()
        metrics = episode.metrics()
        return Outcome(metrics["accuracy"], metrics)


@dataclass
class CodeEpisode:
    session: PythonSession
    answer: str
    value: str = ""  # of the last expression so far
    failed: bool = False  # whether the last code raised

    def metrics(self) -> dict[str, float]:
        return {"accuracy": float(same_literal(self.value, self.answer)), "errors": float(self.failed)}


def _execute(session: PythonSession, code: str, timeout_s: float) -> ExecutionResult:
    """Run code, and return what comes of it; an error of the interpreter is told, too."""
    try:
        return session.execute(code, timeout_s)
    except (ToolError, TimeoutError) as error:
        return ExecutionResult("", None, f"error: {error}")
