"""Tasksets of the `verifiers` package (https://github.com/primeintellect-ai/verifiers), version 0.4.

A taskset provides both the prompts and the judge, so a recipe names it twice:

    data.train: {dataset_name: pipeline.environments.verifiers.tasks, messages_key: messages, output_key: answer, env_name: hub,
                 kwargs: {taskset: gsm8k-v1, size: 1000}}  # validation: the same with another `first`, such as 1000
    env.hub:    {kind: verifiers, kwargs: {taskset: gsm8k-v1}}

A turn of the policy is one completion of the task's program. Its tool calls are read in the model's own format
(`pipeline/data/call_parsers.py`), and the results of the tools are the observation. The prompt must list the tools:
policy.tokenizer.chat_template_kwargs.tools.

Hetstep does not depend on the package. Install it in the generate image, and in the train image too, which reads the data set.
Leaves out: environments of several agents, tasks that need a container, tasks in which the user speaks first; see
`verifiers_bridge.py`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.environments.environment import AnsweredTurn, BuiltinEnvironment, EnvironmentContext, Outcome
from pipeline.recipe.values import MISSING, Text

if TYPE_CHECKING:
    from pipeline.environments.verifiers_bridge import CompletionRequest, TaskEpisode
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
    reads_calls = True
    workers = 16

    def __init__(self, arguments: VerifiersArguments, context: EnvironmentContext) -> None:
        _check_installed()
        bridge = _load_bridge()
        try:
            loaded_tasks = bridge.Tasks(arguments.taskset, arguments.config)
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(f"taskset: {error}") from error
        if context.call_parser is None:
            raise ValueError("no parser of tool calls was given")
        self._bridge, self._timeout_s, self._parser = bridge.Bridge(loaded_tasks), context.timeout_s, context.call_parser

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
        return self.step_answer(episode, AnsweredTurn(text))

    @override
    def step_answer(self, episode: TaskEpisode, answer: AnsweredTurn) -> Outcome:
        """Answer the open request and run the task to its next request or end. Raises RuntimeError if it ends with errors."""
        bridge = _load_bridge()
        assert episode.request is not None
        message_count = len(episode.request.messages)
        turn = self._turn(episode.request, answer)
        event = self._bridge.answer(episode, turn, self._timeout_s)
        if isinstance(event, bridge.CompletionRequest):
            replies = event.messages[message_count + 1 :]
            return Outcome(0.0, {}, replies, turn=turn if "tool_calls" in turn else None)
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

    def _turn(self, request: CompletionRequest, answer: AnsweredTurn) -> dict[str, Any]:
        """Return an answer as an assistant message. Malformed calls alone stay in its text, so that the task sees an answer."""
        said = answer.text if answer.tokens is None else answer.tokens
        turn = self._parser.parse(said, request.tools, first=len(request.messages))
        calls = tuple(call for call in turn.calls if not call.error)
        if not calls:
            return {"role": "assistant", "content": answer.text}
        message = replace(turn, reasoning="", calls=calls).message
        for call in message["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return message


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
