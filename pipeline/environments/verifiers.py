"""Tasksets of the `verifiers` package (https://github.com/primeintellect-ai/verifiers), version 0.4.

A taskset provides both the prompts and the judge, so a recipe names it twice:

    data.train: {dataset_name: pipeline.environments.verifiers.tasks, messages_key: messages, output_key: answer, env_name: hub,
                 kwargs: {taskset: gsm8k-v1, size: 1000}}  # validation: the same with another `first`, such as 1000
    env.hub:    {kind: verifiers, kwargs: {taskset: gsm8k-v1}}

A turn of the policy is one completion of the task's program. Its tool calls are parsed in Hermes' format (`tool_calls.py`), and
the results of the tools are the observation. The prompt must list the tools: policy.tokenizer.chat_template_kwargs.tools.

Hetstep does not depend on the package. Install it in the generate image, and in the train image too, which reads the data set.
Leaves out: environments of several agents, tasks that need a container, tasks in which the user speaks first; see
`verifiers_bridge.py`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.environments.environment import BuiltinEnvironment, EnvironmentContext, Outcome
from pipeline.environments.tool_calls import HermesCalls
from pipeline.recipe.values import MISSING, Text

if TYPE_CHECKING:
    from pipeline.environments.verifiers_bridge import TaskEpisode
    from pipeline.types import Prompt


def tasks(
    split: str, seed: int, taskset: str, size: int, first: int = 0, config: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return `size` tasks from number `first` on, as `{"messages": [{"role", "content"}, ...], "answer": number of the task}`.

    config: the taskset's configuration. `split` and `seed` have no effect, since tasksets have no splits and are not shuffled.
    So a validation set needs other task numbers or another config. Raises ValueError if the package is not installed.
    """
    _check_installed()
    bridge = _load_bridge()
    selection = itertools.islice(bridge.Tasks(taskset, config or {}).taskset, first, first + size)
    return [{"messages": bridge.initial_messages(task.data), "answer": str(task.data.idx)} for task in selection]


@dataclass
class VerifiersArguments:
    """The kwargs of `kind: verifiers`."""

    taskset: Text = MISSING
    """Name of an installed taskset."""
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration of the taskset."""


class Verifiers(BuiltinEnvironment):
    """Plays tasks of a taskset. The reward is the task's; the metrics are the task's rewards and metrics, under their names.

    An episode that ends before its task has reward 0. `timeout_s` covers the task's work between two turns.
    """

    Arguments = VerifiersArguments
    package = "verifiers"
    is_final = False
    workers = 16

    def __init__(self, arguments: VerifiersArguments, context: EnvironmentContext) -> None:
        _check_installed()
        bridge = _load_bridge()
        try:
            loaded_tasks = bridge.Tasks(arguments.taskset, arguments.config)
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(f"taskset: {error}") from error
        self._bridge, self._timeout_s, self._calls = bridge.Bridge(loaded_tasks), context.timeout_s, HermesCalls()

    @override
    def reset(self, prompt: Prompt) -> TaskEpisode:
        """Begin a task and run it up to its first completion request.

        Raises ValueError if the task's first messages differ from the prompt, and RuntimeError if the task ends before its
        first request.
        """
        episode = self._bridge.begin(int(prompt.task["answer"]), self._timeout_s)
        if episode.request is None:
            raise RuntimeError("the task ended before it requested a completion")
        if _role_content_pairs(episode.request.messages) != _role_content_pairs(prompt.task["messages"]):
            raise ValueError(
                "the task's first messages differ from the prompt; expected the same `taskset` and `config` in env and data"
            )
        return episode

    @override
    def step(self, episode: TaskEpisode, text: str) -> Outcome:
        """Answer the open request and run the task to its next request or end. Raises RuntimeError if it ends with errors."""
        bridge = _load_bridge()
        assert episode.request is not None
        message_count = len(episode.request.messages)
        event = self._bridge.answer(episode, self._message(text), self._timeout_s)
        if isinstance(event, bridge.CompletionRequest):
            return Outcome(0.0, {}, _observation(event.messages[message_count + 1 :]))
        if not event.ok:
            raise RuntimeError(
                "; ".join(f"{error.type}: {error.message}" for error in event.errors) or f"ended by {event.stop_condition}"
            )
        scores = {name: reward.score for name, reward in event.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in {**event.metrics, **scores}.items() if value is not None}
        return Outcome(event.reward, metrics)

    @override
    def close(self) -> None:
        self._bridge.close()

    def _message(self, text: str) -> dict[str, Any]:
        """Return a text as an assistant message. A malformed call stays in the message's text, so the task sees an answer."""
        calls = [call for call in self._calls.calls(text) if not call.error]
        if not calls:
            return {"role": "assistant", "content": text}
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        return {
            "role": "assistant",
            "content": text.partition(HermesCalls.OPEN)[0].strip(),
            "tool_calls": [
                {"id": f"call_{i}", "type": "function", "function": function} for i, function in enumerate(functions)
            ],
        }


def _observation(messages: list[dict[str, Any]]) -> dict[str, str]:
    roles = {message["role"] for message in messages}
    if len(roles) != 1:
        raise ValueError(
            f"got messages of {' and '.join(sorted(roles)) or 'nobody'} between two turns of the policy; expected a single role"
        )
    return {"role": roles.pop(), "content": "\n".join(str(message["content"]) for message in messages)}


def _role_content_pairs(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _load_bridge():
    from pipeline.environments import verifiers_bridge  # imports an optional package

    return verifiers_bridge


def _check_installed() -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError(
            "the package verifiers is not installed where this rank runs. Try pip install 'verifiers==0.4.*' in its image"
        )
