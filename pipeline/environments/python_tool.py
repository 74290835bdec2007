"""Python as a tool: an interpreter in the sandbox that keeps its names from one call of an episode to the next."""

from __future__ import annotations

import dataclasses
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

import pipeline.sandbox
from pipeline.environments.base import Configurable
from pipeline.environments.tool import Tool, ToolError, ToolSession
from pipeline.sandbox.guard_client import InteractiveProgram
from pipeline.sandbox.interpreter import ANSWER
from pipeline.sandbox.limits import BACKEND_CHOICES, ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from pipeline.values import Check, Float, Positive, Text

INTERPRETER = (Path(pipeline.sandbox.__file__).parent / "interpreter.py").read_bytes()
LIMITS = {limit.name: limit.default for limit in dataclasses.fields(ResourceLimits)}
START_S = 30.0  # for the interpreter to be there, besides the time of its first call


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of a piece of code that ended by itself. Its texts take at most `output_bytes` together, in UTF-8."""

    printed: str
    value: str | None  # the text of its last expression's value; None: it does not end in one
    error: str | None  # what it raised, with its line


def _not_absolute(path: str) -> str | None:
    return None if path.startswith("/") else f"got '{path}'; expected an absolute path"


Folder = Annotated[Text, Check(_not_absolute)]


@dataclass
class SandboxArguments:
    """Limits are for all processes of one program together, unless they say otherwise."""

    sandbox: Annotated[Literal[BACKEND_CHOICES], Field(description="How programs are contained.")] = BACKEND_CHOICES[0]
    readable: Annotated[list[Folder], Field(description="More folders that a program may read; absolute paths.")] = field(
        default_factory=list
    )
    wall_s: Annotated[Float, Field(gt=0, description="Seconds of wall time.")] = LIMITS["wall_s"]
    cpu_s: Annotated[Float, Field(gt=0, description="Seconds of CPU time.")] = LIMITS["cpu_s"]
    memory_bytes: Annotated[Positive, Field(description="Bytes of memory.")] = LIMITS["memory_bytes"]
    processes: Annotated[Positive, Field(description="Processes, with their threads.")] = LIMITS["processes"]
    output_bytes: Annotated[Positive, Field(description="Bytes of stdout and stderr.")] = LIMITS["output_bytes"]
    scratch_bytes: Annotated[Positive, Field(description="Bytes of all files.")] = LIMITS["scratch_bytes"]
    scratch_files: Annotated[Positive, Field(description="Number of files.")] = LIMITS["scratch_files"]
    open_files: Annotated[Positive, Field(description="Open files of each process.")] = LIMITS["open_files"]

    def make_sandbox(self) -> Sandbox:
        """Return the sandbox. Raises SandboxError, saying what to do, where code cannot be contained."""
        return Sandbox(ResourceLimits(**{name: getattr(self, name) for name in LIMITS}), self.sandbox, tuple(self.readable))


@dataclass
class PythonArguments(SandboxArguments):
    output_bytes: Annotated[Positive, Field(description="Bytes of stdout and stderr of each call.")] = 1 << 16
    session_s: Annotated[
        Float, Field(ge=1, le=1e6, description="Seconds that an interpreter lives, with the time between its calls.")
    ] = 3600.0


class PythonTool(Configurable, Tool):
    """The limits `wall_s` and `output_bytes` are for each call, `cpu_s` for an interpreter."""

    Arguments = PythonArguments
    parameters = {"code": str}  # noqa: RUF012

    def __init__(self, arguments: PythonArguments) -> None:
        """Raises SandboxError as `make_sandbox` does."""
        self._sandbox, self._session_s = arguments.make_sandbox(), arguments.session_s

    def open(self) -> PythonSession:
        """Return a session. It is cheap: the interpreter starts with the first call."""
        return PythonSession(self._sandbox, self._session_s)


class PythonSession(ToolSession):
    """An interpreter that has to be killed, for its time or its memory, is followed by a fresh one."""

    def __init__(self, sandbox: Sandbox, session_s: float) -> None:
        self._sandbox, self._session_s = sandbox, session_s
        self._program: InteractiveProgram | None = None

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return what was printed, and the value of a last expression. Raises ToolError for what the code raised, or broke, and
        TimeoutError.
        """
        executed = self.execute(arguments["code"], timeout_s)
        told = executed.printed
        if executed.error is not None:
            raise ToolError(told + "\n" * bool(told and not told.endswith("\n")) + executed.error)
        return told + (executed.value if executed.value not in (None, "None") else "")

    def execute(self, code: str, timeout_s: float) -> ExecutionResult:
        """Raises ToolError if the interpreter does not live through it, TimeoutError, and SandboxError; all lose its names."""
        limits = self._sandbox.limits
        seconds, begun = min(limits.wall_s, timeout_s), time.monotonic()
        deadline = begun + seconds
        try:
            if self._program is None:
                deadline = begun + min(seconds + START_S, timeout_s)
                argv = [self._sandbox.python, "interpreter.py", str(limits.output_bytes)]
                self._program = self._sandbox.start(argv, {"interpreter.py": INTERPRETER}, self._session_s)
            return self._ask(self._program, code, deadline)
        except TimeoutError:
            self.close()
            raise TimeoutError(f"the code did not end within {seconds:g} s; all names are gone") from None
        except (EOFError, ValueError):  # it is gone, or what it says is no answer
            program, self._program = self._program, None
            ended_by = program.close()
            why = f" ({ended_by})" if ended_by not in ("exit", "closed") else ""
            raise ToolError(f"the interpreter ended{why}; all names are gone") from None

    def close(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.close()

    def _ask(self, program: InteractiveProgram, code: str, deadline: float) -> ExecutionResult:
        question = code.encode(errors="replace")
        program.send(struct.pack("<I", len(question)) + question, deadline)
        lengths = ANSWER.unpack(program.receive(ANSWER.size, deadline))
        most = self._sandbox.limits.output_bytes
        if min(lengths) < -1 or lengths[0] < 0 or sum(max(0, length) for length in lengths) > most:
            raise ValueError("no answer, or too long")
        texts = [None if length < 0 else program.receive(length, deadline).decode(errors="ignore") for length in lengths]
        return ExecutionResult(*texts)
