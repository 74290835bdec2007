"""Tasksets of the `verifiers` package (https://github.com/primeintellect-ai/verifiers), version 0.4.

A taskset provides both the prompts and the judge, so a recipe names it twice:

    data.train: {dataset_name: pipeline.environments.verifiers.tasks, messages_key: messages, output_key: answer, env_name: hub,
                 kwargs: {taskset: gsm8k-v1, size: 1000}}  # validation: the same with another `first`, such as 1000
    env.hub:    {kind: verifiers, timeout_s: 120, kwargs: {taskset: gsm8k-v1}}

The package plays an episode with its own environment, agents and harnesses, and asks the policy through the episode's
endpoint. `environment` has the settings of its `[env]` block, for example another harness or the most turns of a conversation,
after which the answer is scored:

    environment: {agent: {harness: {id: bash}, max_turns: 8}}

Without settings, an agent's harness is the taskset's or else `null`, a chat with the task's tools, and its programs run on this
node with this user's rights. The package's own defaults are `bash`, and a sandbox of its maker. Where agents are several, the
reward is the mean of those that it calls trainable; a role with its own `model` and `client` is not the policy's.

Hetstep does not depend on the package. Install it in the generate image, and in the train image too, which reads the data set.
Its harnesses are programs that uv installs when they first run.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.environments.environment import AgentAccess, AgentEnvironment, EnvironmentContext, EpisodeFailed, Outcome
from pipeline.recipe.values import MISSING, Text

if TYPE_CHECKING:
    from pipeline.types import Prompt


def tasks(
    split: str, seed: int, taskset: str, size: int, first: int = 0, config: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return `size` tasks from number `first` on, as `{"messages": [{"role", "content"}, ...], "answer": number of the task}`.

    config: the taskset's configuration. `split` and `seed` have no effect, since tasksets have no splits and are not shuffled.
    So a validation set needs other task numbers or another config. Raises ValueError if the package is not installed.
    """
    _check_installed()
    selection = itertools.islice(_load_taskset(taskset, config or {}), first, first + size)
    return [{"messages": _first_messages(task.data), "answer": str(task.data.idx)} for task in selection]


@dataclass
class VerifiersArguments:
    """The kwargs of `kind: verifiers`."""

    taskset: Text = MISSING
    """Name of an installed taskset."""
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration of the taskset."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Configuration of the package's environment, its `[env]` block: `id`, agents such as `agent: {harness: {id: bash}}`."""


class Verifiers(AgentEnvironment):
    """Plays tasks of a taskset. The reward is the task's; the metrics are its rewards and metrics, under their names."""

    Arguments = VerifiersArguments
    package = "verifiers"
    workers = 64

    @classmethod
    @override
    def needs_answers(cls, arguments: Any) -> bool:
        """Return True: the answer is the number of the task."""
        return True

    def __init__(self, arguments: VerifiersArguments, context: EnvironmentContext) -> None:
        """Load the taskset and its environment. Raises ValueError if the package has none of this name or configuration."""
        _check_installed()
        try:
            self._environment = _load_environment(arguments)
            self._tasks = _Tasks(_load_taskset(arguments.taskset, arguments.config))
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(f"taskset: {error}") from error

    @override
    async def play(self, prompt: Prompt, access: AgentAccess, seed: int) -> Outcome:
        """Play a task. Raises EpisodeFailed if its messages are not the prompt's, or if it ends with errors."""
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] optional package
        from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports] as above

        task = self._tasks[int(prompt.task["answer"])]
        if _first_messages(task.data) != [
            {"role": message["role"], "content": message["content"]} for message in prompt.task["messages"]
        ]:
            raise EpisodeFailed(
                "the task's first messages differ from the prompt; expected the same `taskset` and `config` in env and data"
            )
        variable = f"HETSTEP_KEY_{uuid.uuid4().hex}"  # the package reads keys from variables alone
        os.environ[variable] = access.key
        policy = ModelContext("policy", vf.EvalClientConfig(base_url=f"{access.url}/v1", api_key_var=variable))
        environment = copy.copy(self._environment)  # its servers are of this episode
        try:
            async with environment.serving():
                episode = await environment.run_episode(task, policy)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            stops = [f"ended by {trace.stop_condition}" for trace in episode.traces if not trace.ok]
            raise EpisodeFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "; ".join(stops))
        return _outcome(episode.traces)


def _outcome(traces: list[Any]) -> Outcome:
    """Return the outcome of an episode: of its only trace, or the means of its trainable ones, with metrics AGENT/NAME."""
    learned = [trace for trace in traces if trace.agent.trainable]
    values: dict[str, list[float]] = {}
    for trace in traces:
        agent = f"{trace.agent.name}/" if len(traces) > 1 else ""
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**trace.metrics, **scores}.items():
            if value is not None:
                values.setdefault(agent + name, []).append(float(value))
    reward = sum(trace.reward for trace in learned) / max(1, len(learned))
    return Outcome(reward, {name: sum(numbers) / len(numbers) for name, numbers in values.items()})


class _Tasks:
    """The tasks of a taskset, indexed by number. Each task is loaded only once."""

    def __init__(self, taskset: Iterable[Any]) -> None:
        self._iterator, self._loaded, self._lock = iter(taskset), [], threading.Lock()

    def __getitem__(self, number: int) -> Any:
        """Return the task with a number. Raises IndexError if the taskset has no such task."""
        with self._lock:
            self._loaded += itertools.islice(self._iterator, max(0, number + 1 - len(self._loaded)))
            return self._loaded[number]


def _load_taskset(taskset: str, config: dict[str, Any]) -> Iterable[Any]:
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports] optional package

    return loaders.load_taskset(loaders.taskset_config_type(taskset).model_validate({**config, "id": taskset}))


def _load_environment(arguments: VerifiersArguments) -> Any:
    """Return the package's environment, whose agents have a harness and a runtime of this node where nothing names others."""
    from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports] optional package
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports] as above

    ours = {**arguments.environment, "taskset": {**arguments.config, "id": arguments.taskset}}
    described = loaders.env_config_type(arguments.taskset, ours.get("id") or "")
    ships_harness = loaders.default_harness_id(arguments.taskset) == arguments.taskset
    for name in agent_config_fields(described.model_validate(ours)):
        settings = dict(ours.get(name) or {})
        settings.setdefault("runtime", {"type": "subprocess"})
        if not ships_harness:
            settings.setdefault("harness", {"id": "null"})
        ours[name] = settings
    return loaders.load_environment(described.model_validate(ours))


def _first_messages(data: Any) -> list[dict[str, Any]]:
    """Return a task's first messages, or its description if a simulated user speaks first."""
    from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports] optional package

    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None:
        return [*system, {"role": "user", "content": data.description or data.name or f"Task {data.idx}"}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *map(message_to_wire, data.prompt)]


def _check_installed() -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError(
            "the package verifiers is not installed where this rank runs. Try pip install 'verifiers==0.4.*' uv in its image"
        )
