"""A program of yours plays each episode: it asks the policy through an endpoint of OpenAI's or Anthropic's form.

    env.sums: {kind: agent, timeout_s: 300, kwargs: {command: [python, my_agent.py], reward: last_line}}

The command runs once per episode, in a new folder that is its working directory and home. It gets the task as one JSON object
on stdin, and in the file that HETSTEP_TASK_FILE names:

    {"messages": [{"role", "content"}, ...] or "text": "...", and the `columns` of the record}

OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set; any model name works. What the policy says is
learned, with the reward that `reward` names. An agent that fails, hangs, prints too much or leaves processes behind costs its
own episode.

The command runs with this user's rights, or in a container of `sandbox: {image: ...}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.environments.agent_places import AgentPlace, AgentRun, HostFolder, ImageContainer, find_program
from pipeline.environments.environment import AgentAccess, AgentEnvironment, EnvironmentContext, EpisodeFailed, Outcome
from pipeline.environments.shell_tool import ShellArguments, ShellTool
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import MISSING, Float, Positive, Text
from pipeline.types import REWARDS, is_reward

if TYPE_CHECKING:
    from pipeline.types import Prompt

STDERR_CHARACTERS = 4000
"""Characters of the end of stderr that a rollout's notes have."""
SECRETS = ("answer", "record")
"""Entries of a task that an agent does not get: what its answer is judged by."""
OF_EPISODES = {"wall_s": "episode_s", "session_s": "episode_s", "output_bytes": "output_bytes"}
"""Limits of a shell's calls -> the keys that take their place for an agent."""


@dataclass
class AgentArguments:
    """The kwargs of `kind: agent`."""

    command: Any = MISSING
    """The program and its arguments. Arguments that are files beside the recipe or on Python's path become absolute."""
    reward: Literal["last_line", "exit", "file", "command", "judge"] = "last_line"
    """Source of the reward. last_line: the last line of stdout, a number or {"reward": NUMBER, "metrics": {...}}.
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
    sandbox: ShellArguments | None = None
    """{image, limits}: run the commands in a container of an image for each episode, in which the policy is all that they
    reach. The image's path may have columns of the record in it, such as /images/{name}.sqsh. The limits of time and output are
    episode_s and output_bytes. null: in a folder of this machine, with your rights."""
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
        if arguments.sandbox:
            yield from ShellTool.check(f"{key}.sandbox", arguments.sandbox)
            for name, instead in OF_EPISODES.items():
                if getattr(arguments.sandbox, name) != getattr(ShellArguments, name):
                    message = f"got a value; an agent's limit is {key}.{instead}. Try {key}.{instead}=VALUE"
                    yield Problem(f"{key}.sandbox.{name}", "has-no-effect", message)
        needs = {"command": "score", "judge": "judge"}
        for source, name in needs.items():
            has = bool(getattr(arguments, name))
            if has and arguments.reward != source:
                message = f"got a value with {key}.reward={arguments.reward}; expected none. Try {key}.reward={source}"
                yield Problem(f"{key}.{name}", "has-no-effect", message)
            if not has and arguments.reward == source:
                yield Problem(f"{key}.{name}", "missing-value", f"expected a value with {key}.reward={source}")

    def __init__(self, arguments: AgentArguments, context: EnvironmentContext) -> None:
        """Find the command's files, or open a container once, if no column names its image.

        Raises ValueError for a program or a folder that does not exist, ImageError, and SandboxError with remedies.
        """
        self._arguments = arguments
        self._sandbox = None
        if arguments.sandbox:
            limits = {"wall_s": arguments.episode_s, "output_bytes": arguments.output_bytes}
            self._sandbox = replace(arguments.sandbox, **limits).make_sandbox()
            if "{" not in arguments.sandbox.image:
                self._sandbox.open(arguments.sandbox.image).close()
        self._command, self._score = arguments.command, arguments.score
        if not self._sandbox:
            self._command = find_program(arguments.command)
            self._score = find_program(arguments.score) if arguments.score else []
        self._judge = context.build(arguments.judge) if arguments.judge else None
        if arguments.files and not os.path.isdir(arguments.files):
            raise ValueError(f"files: got {arguments.files}; expected a folder")

    @override
    async def play(self, prompt: Prompt, access: AgentAccess, seed: int) -> Outcome:
        """Run the agent and return its reward. Raises EpisodeFailed for an agent that fails, with the end of its stderr."""
        arguments = self._arguments
        place: AgentPlace = HostFolder(access, arguments.files, arguments.output_bytes)
        if arguments.sandbox:
            assert self._sandbox
            image = _filled(arguments.sandbox.image, prompt.task.get("record") or {})
            place = ImageContainer(access, self._sandbox, image, arguments.files)
        try:
            async with asyncio.timeout(arguments.episode_s), place:
                outcome = await self._run(prompt, place, seed)
        except (TimeoutError, EpisodeFailed) as error:
            if isinstance(error, TimeoutError):
                error = EpisodeFailed(f"the command took more than {arguments.episode_s:g} s (episode_s)")
            error.notes |= _notes(place)
            raise error from None
        return replace(outcome, notes={**outcome.notes, **_notes(place)})

    async def _run(self, prompt: Prompt, place: AgentPlace, seed: int) -> Outcome:
        arguments = self._arguments
        task = {name: value for name, value in prompt.task.items() if name not in SECRETS}
        record = prompt.task.get("record") or {}
        task |= {name: record[name] for name in arguments.columns if name in record}
        variables = {**place.access.variables, "HETSTEP_SEED": str(seed), **arguments.variables}
        ran = await place.run(self._command, task, variables)
        if arguments.reward == "exit":
            return Outcome(1.0 if ran.status == 0 else 0.0)
        _check_status("the command", ran, place)
        if arguments.reward == "judge":
            assert self._judge
            return await asyncio.to_thread(lambda judge: judge.step(judge.reset(prompt), ran.output.strip()), self._judge)
        if arguments.reward == "file":
            return _read_reward(await self._read(place, arguments.reward_file), arguments.reward_file)
        if arguments.reward == "command":
            ran = await place.run(self._score, {**prompt.task, "output": ran.output}, arguments.variables, shown=False)
            _check_status("the command `score`", ran, place)
        return _read_reward(_last_line(ran.output), "the last line")

    async def _read(self, place: AgentPlace, name: str) -> str:
        try:
            return await place.read(name)
        except (OSError, ValueError) as error:
            raise EpisodeFailed(f"{name}: the command left no text there: {error}") from None


def _filled(image: str, record: dict[str, Any]) -> str:
    """Return the path of an image with a record's columns in it. Raises EpisodeFailed if the record lacks one."""
    try:
        return image.format_map(record)
    except (LookupError, ValueError) as error:
        got = f"sandbox.image: got {image}; expected columns of the record: {', '.join(record)}: {error}"
        raise EpisodeFailed(got, of_answer=False) from None


def _check_status(who: str, ran: AgentRun, place: AgentPlace) -> None:
    if ran.status != 0:
        raise EpisodeFailed(f"{who} exited with status {ran.status}: {_last_line(place.errors) or 'it printed no error'}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _read_reward(text: str, source: str) -> Outcome:
    """Return the outcome that a text states. Raises EpisodeFailed if it states none."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    reward, metrics = (value.get("reward"), value.get("metrics") or {}) if isinstance(value, dict) else (value, {})
    if isinstance(reward, bool):
        reward = float(reward)
    if isinstance(reward, int | float) and is_reward(reward):
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            return Outcome(float(reward), {str(name): float(number) for name, number in metrics.items()})
    expected = f'{REWARDS}, or {{"reward": NUMBER, "metrics": {{NAME: NUMBER}}}}'
    raise EpisodeFailed(f"{source} of the command: got {text[:80]!r}; expected {expected}")


def _notes(place: AgentPlace) -> dict[str, str]:
    return {"stderr": place.errors[-STDERR_CHARACTERS:]} if place.errors.strip() else {}
