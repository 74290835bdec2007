"""A Python tool: an interpreter in the sandbox. Its variables persist from one call of an episode to the next."""

from __future__ import annotations

import dataclasses
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import override

import pipeline.sandbox
from pipeline.environments.environment import Configurable
from pipeline.environments.tool import Tool, ToolError, ToolSession
from pipeline.recipe.values import Check, Float, Positive, Text
from pipeline.sandbox.guard_client import InteractiveProgram
from pipeline.sandbox.interpreter import ANSWER
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox, SandboxChoice

INTERPRETER = (Path(pipeline.sandbox.__file__).parent / "interpreter.py").read_bytes()
LIMITS = ResourceLimits()
START_S = 30.0  # to start the interpreter, on top of the time of its first call


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of a piece of code that ended by itself. Its texts together have at most `output_bytes` bytes in UTF-8."""

    printed: str
    value: str | None  # text of the last expression's value; None: the code does not end in an expression
    error: str | None  # the exception and its line; None: the code raised none


def _not_absolute(path: str) -> str | None:
    return None if path.startswith("/") else f"got '{path}'; expected an absolute path"


Folder = Annotated[Text, Check(_not_absolute)]


@dataclass
class SandboxArguments:
    """The kwargs of the sandbox, which all environments and tools that run programs share.

    Limits hold for all processes of one program together, unless a field says otherwise.
    """

    sandbox: SandboxChoice = "auto"
    """The sandbox: auto is bubblewrap; none isolates nothing."""
    readable: list[Folder] = field(default_factory=list)
    """More folders that a program may read, as absolute paths."""
    wall_s: Annotated[Float, Field(gt=0)] = LIMITS.wall_s
    """Maximum wall time in seconds."""
    cpu_s: Annotated[Float, Field(gt=0)] = LIMITS.cpu_s
    """Maximum CPU time in seconds."""
    memory_bytes: Positive = LIMITS.memory_bytes
    """Maximum memory in bytes."""
    processes: Positive = LIMITS.processes
    """Maximum number of processes and threads."""
    output_bytes: Positive = LIMITS.output_bytes
    """Maximum bytes of stdout and stderr."""
    scratch_bytes: Positive = LIMITS.scratch_bytes
    """Maximum bytes of all files."""
    scratch_files: Positive = LIMITS.scratch_files
    """Maximum number of files."""
    open_files: Positive = LIMITS.open_files
    """Maximum number of open files of a process."""

    def make_sandbox(self) -> Sandbox:
        """Return the sandbox. Raises SandboxError with remedies where bubblewrap does not work."""
        limits = ResourceLimits(**{limit.name: getattr(self, limit.name) for limit in dataclasses.fields(ResourceLimits)})
        return Sandbox(limits, self.sandbox, tuple(self.readable))


@dataclass
class PythonArguments(SandboxArguments):
    """The kwargs of the tool `python`."""

    output_bytes: Positive = 1 << 16
    """Maximum bytes of stdout and stderr of a call."""
    session_s: Annotated[Float, Field(ge=1, le=1e6)] = 3600.0
    """Maximum time, in seconds, of an interpreter, including the time between calls."""


class PythonTool(Configurable, Tool):
    """Runs Python code. The limits `wall_s` and `output_bytes` hold for each call, `cpu_s` for an interpreter."""

    Arguments = PythonArguments
    parameters: ClassVar = {"code": str}
    description = "Run Python code. Names persist from one call to the next."
    descriptions: ClassVar = {"code": "The code. What it prints, and the value of its last expression, are the result."}

    def __init__(self, arguments: PythonArguments) -> None:
        """Make the sandbox. Raises SandboxError as `make_sandbox` does."""
        self._sandbox, self._session_s = arguments.make_sandbox(), arguments.session_s

    def open(self) -> PythonSession:
        """Return a session without starting its interpreter, which the first call does."""
        return PythonSession(self._sandbox, self._session_s)


class PythonSession(ToolSession):
    """An episode's interpreter. If it is killed for its time or memory, the next call starts another."""

    def __init__(self, sandbox: Sandbox, session_s: float) -> None:
        self._sandbox, self._session_s = sandbox, session_s
        self._program: InteractiveProgram | None = None

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Run the code and return the printed text, followed by the value of its last expression.

        Raises ToolError for an exception of the code or the end of the interpreter, and TimeoutError.
        """
        result = self.execute(arguments["code"], timeout_s)
        printed = result.printed
        if result.error is not None:
            raise ToolError(printed + "\n" * bool(printed and not printed.endswith("\n")) + result.error)
        return printed + (result.value if result.value not in (None, "None") else "")

    def execute(self, code: str, timeout_s: float) -> ExecutionResult:
        """Run a piece of code and return its result.

        Raises ToolError if the interpreter ends, TimeoutError, or SandboxError. Each of these errors loses the variables.
        """
        limits = self._sandbox.limits
        seconds, start = min(limits.wall_s, timeout_s), time.monotonic()
        deadline = start + seconds
        try:
            if self._program is None:
                deadline = start + min(seconds + START_S, timeout_s)
                argv = [self._sandbox.python, "interpreter.py", str(limits.output_bytes)]
                self._program = self._sandbox.start(argv, {"interpreter.py": INTERPRETER}, self._session_s)
            return self._exchange(self._program, code, deadline)
        except TimeoutError:
            self.close()
            raise TimeoutError(f"the code did not end within {seconds:g} s; all names are gone") from None
        except (EOFError, ValueError):  # the interpreter has ended, or its answer is malformed
            program, self._program = self._program, None
            assert program is not None  # only `_exchange` raises these
            ended_by = program.close()
            cause = f" ({ended_by})" if ended_by not in ("exit", "closed") else ""
            raise ToolError(f"the interpreter ended{cause}; all names are gone") from None

    @override
    def close(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.close()

    def _exchange(self, program: InteractiveProgram, code: str, deadline: float) -> ExecutionResult:
        request = code.encode(errors="replace")
        program.send(struct.pack("<I", len(request)) + request, deadline)
        lengths = ANSWER.unpack(program.receive(ANSWER.size, deadline))
        output_bytes = self._sandbox.limits.output_bytes
        if min(lengths) < -1 or lengths[0] < 0 or sum(max(0, length) for length in lengths) > output_bytes:
            raise ValueError("the answer is malformed or too long")
        printed = program.receive(lengths[0], deadline).decode(errors="ignore")
        value, error = (
            None if length < 0 else program.receive(length, deadline).decode(errors="ignore") for length in lengths[1:]
        )
        return ExecutionResult(printed, value, error)
