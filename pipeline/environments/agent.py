"""A program of yours plays each episode: it asks the policy through an endpoint of OpenAI's or Anthropic's form.

    env.sums: {kind: agent, timeout_s: 300, kwargs: {command: [python, my_agent.py], reward: last_line}}

The command runs once per episode, in a new folder that is its working directory and home. It gets the task as one JSON object
on stdin, and in the file that HETSTEP_TASK_FILE names:

    {"messages": [{"role", "content"}, ...] or "text": "...", and the `columns` of the record}

OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set; any model name works. What the policy says is
learned, with the reward that `reward` names. An agent that fails, hangs, prints too much or leaves processes behind costs its
own episode.

The command runs with this user's rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.environments.environment import AgentAccess, AgentEnvironment, EnvironmentContext, Outcome
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import MISSING, Float, Positive, Text
from pipeline.sandbox import linux, processes
from pipeline.types import REWARDS, is_reward

if TYPE_CHECKING:
    from pipeline.types import Prompt

CHUNK = 1 << 16
NOTE_BYTES = 2000
DRAIN_S = 0.5
SECRETS = ("answer", "record")
"""Entries of a task that an agent does not get: what its answer is judged by."""


@dataclass
class AgentArguments:
    """The kwargs of `kind: agent`."""

    command: Any = MISSING
    """The program and its arguments. Arguments that are files beside the recipe or on Python's path become absolute."""
    reward: Literal["last_line", "exit", "file", "command", "judge"] = "last_line"
    """Where the reward comes from. last_line: the last line of stdout, a number or {"reward": NUMBER, "metrics": {...}}.
    exit: 1 for status 0, else 0. file: reward_file, of the same form. command: the last line of `score`. judge: the
    environment `judge` scores what the agent prints."""
    reward_file: Text = "reward.txt"
    """File in the agent's folder."""
    score: list[Text] = field(default_factory=list)
    """A command that runs in the agent's folder after it. Its stdin has the whole task, with the expected answer, and `output`,
    what the agent printed."""
    judge: Text | None = None
    """Environment that scores what the agent prints, for reward=judge."""
    columns: list[Text] = field(default_factory=list)
    """Columns of the record that the agent gets."""
    files: Text | None = None
    """Folder that is copied to the agent's folder."""
    variables: dict[str, Text] = field(default_factory=dict)
    """Variables of the agent's environment."""
    episode_s: Annotated[Float, Field(gt=0)] = 600.0
    """Maximum seconds of an episode."""
    output_bytes: Positive = 1 << 20
    """Maximum bytes that an agent prints."""


class Agent(AgentEnvironment):
    """Runs a command per episode."""

    Arguments = AgentArguments

    @classmethod
    @override
    def check(cls, key: str, arguments: Any) -> Iterator[Problem]:
        command = arguments.command
        if not isinstance(command, list) or not command or not all(isinstance(part, str) and part for part in command):
            message = f"got {command!r}; expected a list: a program and its arguments. Try [python, my_agent.py]"
            yield Problem(f"{key}.command", "wrong-type", message)
        needs = {"command": "score", "judge": "judge"}
        for source, name in needs.items():
            has = bool(getattr(arguments, name))
            if has and arguments.reward != source:
                message = f"got a value with {key}.reward={arguments.reward}; expected none. Try {key}.reward={source}"
                yield Problem(f"{key}.{name}", "has-no-effect", message)
            if not has and arguments.reward == source:
                yield Problem(f"{key}.{name}", "missing-value", f"expected a value with {key}.reward={source}")

    @classmethod
    @override
    def needs_answers(cls, arguments: Any) -> bool:
        return False

    def __init__(self, arguments: AgentArguments, context: EnvironmentContext) -> None:
        """Find the command's files. Raises ValueError for a program or a folder that does not exist."""
        self._arguments = arguments
        self._command, self._score = _found(arguments.command), _found(arguments.score) if arguments.score else []
        self._judge = context.build(arguments.judge) if arguments.judge else None
        if arguments.files and not os.path.isdir(arguments.files):
            raise ValueError(f"files: got {arguments.files}; expected a folder")
        if context.workers:
            self.workers = context.workers

    @override
    async def play(self, prompt: Prompt, access: AgentAccess, seed: int) -> Outcome:
        """Run the agent and return its reward. Raises RuntimeError or TimeoutError for an agent that fails."""
        folder = Path(tempfile.mkdtemp(prefix="agent-"))
        try:
            if self._arguments.files:
                shutil.copytree(self._arguments.files, folder, dirs_exist_ok=True)
            async with asyncio.timeout(self._arguments.episode_s):
                return await self._run(prompt, access, seed, folder)
        except TimeoutError:
            raise TimeoutError(f"the agent took more than {self._arguments.episode_s:g} s (episode_s)") from None
        finally:
            _end_descendants()
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, prompt: Prompt, access: AgentAccess, seed: int, folder: Path) -> Outcome:
        arguments = self._arguments
        task = {name: value for name, value in prompt.task.items() if name not in SECRETS}
        record = prompt.task.get("record") or {}
        task |= {name: record[name] for name in arguments.columns if name in record}
        variables = {**access.variables, "HETSTEP_SEED": str(seed), **arguments.variables}
        status, output, errors = await self._program(self._command, folder, task, variables)
        if arguments.reward == "exit":
            return _outcome(1.0 if status == 0 else 0.0, {}, errors)
        if status != 0:
            raise RuntimeError(f"the agent ended with status {status}: {_last_line(errors) or 'it printed no error'}")
        if arguments.reward == "judge":
            assert self._judge
            return await asyncio.to_thread(lambda judge: judge.step(judge.reset(prompt), output.strip()), self._judge)
        if arguments.reward == "file":
            return _read_reward((folder / arguments.reward_file).read_text(), arguments.reward_file, errors)
        if arguments.reward == "command":
            status, output, errors = await self._program(self._score, folder, {**prompt.task, "output": output}, {})
            if status != 0:
                raise RuntimeError(f"score ended with status {status}: {_last_line(errors) or 'it printed no error'}")
        return _read_reward(_last_line(output), "the last line", errors)

    async def _program(
        self, command: list[str], folder: Path, task: dict[str, Any], variables: dict[str, str]
    ) -> tuple[int, str, str]:
        """Run a command in the agent's folder, and return (status, stdout, stderr). Raises RuntimeError if it floods."""
        task_file = folder / ".task.json"
        task_file.write_text(json.dumps(task, default=str))
        home = {"HOME": str(folder), "TMPDIR": str(folder), "HETSTEP_TASK_FILE": str(task_file)}
        path = {"PATH": _path(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        output = _Printed(self._arguments.output_bytes)
        with open(task_file, "rb") as stdin:
            program = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **home, **path, **variables},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=linux.die_with_parent,
            )
        assert program.stdout and program.stderr
        reading = asyncio.gather(output.read(program.stdout, output.stdout), output.read(program.stderr, output.stderr))
        ended = asyncio.ensure_future(_ended(program.pid))
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()  # it raises if there is too much
            await ended
            await asyncio.wait({reading}, timeout=DRAIN_S)  # a process that the program has left may hold the pipes open
        finally:
            for waiting in (reading, ended):
                waiting.cancel()
            await asyncio.gather(reading, ended, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            status = program.wait()
        return status, output.stdout.decode(errors="replace"), output.stderr.decode(errors="replace")


class _Printed:
    """What a program prints, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self.stdout, self.stderr, self._most = bytearray(), bytearray(), most

    async def read(self, pipe: IO[bytes], into: bytearray) -> None:
        """Read a pipe to its end. Raises RuntimeError if the program prints too much."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while chunk := await reader.read(CHUNK):
                into += chunk
                if len(self.stdout) + len(self.stderr) > self._most:
                    raise RuntimeError(f"the agent printed more than {self._most} bytes (output_bytes)")
        finally:
            transport.close()


async def _ended(pid: int) -> None:
    """Wait until a child has ended."""
    descriptor, ended = os.pidfd_open(pid), asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def _found(command: list[str]) -> list[str]:
    """Return a command with its files as absolute paths. Raises ValueError if there is no such program."""
    program, *arguments = command
    places = [Path.cwd(), *(Path(place) for place in sys.path if place)]

    def absolute(argument: str) -> str:
        return next((str((place / argument).resolve()) for place in places if (place / argument).is_file()), argument)

    found = shutil.which(program, path=_path()) or (absolute(program) if os.access(absolute(program), os.X_OK) else None)
    if found is None:
        raise ValueError(f"command: got the program {program}; expected one in PATH, or the path of one")
    return [found, *map(absolute, arguments)]


def _path() -> str:
    """Return the variable PATH, with the folder of this interpreter first."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def _end_descendants() -> None:
    """Kill what an agent has left: this process adopts the orphans of its descendants."""
    while pids := processes.descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _read_reward(text: str, source: str, errors: str) -> Outcome:
    """Return the outcome that a text states. Raises ValueError if it states none."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    reward, metrics = (value.get("reward"), value.get("metrics") or {}) if isinstance(value, dict) else (value, {})
    if isinstance(reward, bool):
        reward = float(reward)
    if not isinstance(reward, int | float) or not is_reward(reward):
        raise ValueError(f'{source}: got {text[:80]!r}; expected {REWARDS}, or {{"reward": NUMBER, "metrics": {{...}}}}')
    return _outcome(float(reward), {str(name): float(number) for name, number in metrics.items()}, errors)


def _outcome(reward: float, metrics: dict[str, float], errors: str) -> Outcome:
    notes = {"stderr": errors[-NOTE_BYTES:]} if errors.strip() else {}
    return Outcome(reward, metrics, notes=notes)
