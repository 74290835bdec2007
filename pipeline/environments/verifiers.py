"""Environments of the `verifiers` package (https://github.com/primeintellect-ai/verifiers), version 0.4.

A taskset of that package gives both the prompts and the judge, so a recipe names it twice:

    data.train: {dataset_name: pipeline.environments.verifiers.tasks, messages_key: messages, output_key: answer, env_name: hub,
                 kwargs: {taskset: gsm8k-v1, size: 1000}}  # to validate: the same with, say, first: 1000
    env.hub:    {kind: verifiers, kwargs: {taskset: gsm8k-v1}}

A turn of the policy is one completion of the task's program; its tool calls are read as Hermes' (`tool_calls.py`), and what the
tools answer is the observation. Which tools there are must be in the prompt: policy.tokenizer.chat_template_kwargs.tools.

The package is not one of ours: it goes into the generate image, and, as it reads the data set, into the train image. Leaves
out: environments of several agents, tasks that need a container, a user who speaks first; see `verifiers_bridge.py`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from pipeline.environments.base import BuiltinEnvironment, EnvironmentContext, Outcome
from pipeline.environments.tool_calls import HermesCalls
from pipeline.values import MISSING, Text

if TYPE_CHECKING:
    from pipeline.environments.verifiers_bridge import TaskEpisode
    from pipeline.types import Prompt


def tasks(
    split: str, seed: int, taskset: str, size: int, first: int = 0, config: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return `size` tasks from number `first` on, as `{"messages": [{"role", "content"}, ...], "answer": the task's number}`.

    config: the taskset's own. Tasksets have no splits and draw nothing: `split` and `seed` say nothing, a validation set has
    other numbers or another config. Raises ValueError if the package is not installed.
    """
    _check_installed()
    from pipeline.environments.verifiers_bridge import Tasks, initial_messages

    found = itertools.islice(Tasks(taskset, config or {}).taskset, first, first + size)
    return [{"messages": initial_messages(task.data), "answer": str(task.data.idx)} for task in found]


@dataclass
class VerifiersArguments:
    taskset: Annotated[Text, Field(description="Name of an installed taskset.")] = MISSING
    config: Annotated[dict[str, Any], Field(description="Its configuration.")] = field(default_factory=dict)


class Verifiers(BuiltinEnvironment):
    """Reward: the task's. Metrics: its rewards and metrics, by their names. An episode that ends before the task has reward 0.
    `timeout_s` is for what happens between two turns.
    """

    Arguments = VerifiersArguments
    is_final = False
    workers = 16

    def __init__(self, arguments: VerifiersArguments, context: EnvironmentContext) -> None:
        _check_installed()
        from pipeline.environments.verifiers_bridge import Bridge, Tasks

        try:
            found = Tasks(arguments.taskset, arguments.config)
        except (ModuleNotFoundError, AttributeError) as error:
            raise ValueError(f"taskset: {error}") from error
        self._bridge, self._timeout_s, self._calls = Bridge(found), context.timeout_s, HermesCalls()

    def reset(self, prompt: Prompt) -> TaskEpisode:
        """Raises ValueError if the task begins otherwise than the prompt, RuntimeError if it ends before anything is asked."""
        episode = self._bridge.begin(int(prompt.task["answer"]), self._timeout_s)
        if episode.asked is None:
            raise RuntimeError("the task ended before the policy was asked anything")
        if _plain(episode.asked.messages) != _plain(prompt.task["messages"]):
            raise ValueError(
                "the task begins otherwise than the prompt: env's and data's `taskset` and `config` must be the same"
            )
        return episode

    def step(self, episode: TaskEpisode, text: str) -> Outcome:
        """Raises RuntimeError if the task ended with errors."""
        before = len(episode.asked.messages)
        news = self._bridge.answer(episode, self._message(text), self._timeout_s)
        if episode.asked is not None:
            return Outcome(0.0, {}, _observation(news.messages[before + 1 :]))
        if not news.ok:
            raise RuntimeError(
                "; ".join(f"{error.type}: {error.message}" for error in news.errors) or f"ended by {news.stop_condition}"
            )
        scores = {name: reward.score for name, reward in news.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in {**news.metrics, **scores}.items() if value is not None}
        return Outcome(news.reward, metrics)

    def close(self) -> None:
        self._bridge.close()

    def _message(self, text: str) -> dict[str, Any]:
        """Return a text as a message. A call that cannot be read is left in the text: the task then has an answer without
        it.
        """
        calls = [call for call in self._calls.calls(text) if not call.error]
        if not calls:
            return {"role": "assistant", "content": text}
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        return {
            "role": "assistant",
            "content": text.partition(HermesCalls.OPEN)[0].strip(),
            "tool_calls": [{"id": f"call_{i}", "type": "function", "function": one} for i, one in enumerate(functions)],
        }


def _observation(messages: list[dict[str, Any]]) -> dict[str, str]:
    roles = {message["role"] for message in messages}
    if len(roles) != 1:
        raise ValueError(
            f"between two turns of the policy are messages of {' and '.join(sorted(roles)) or 'nobody'}; of one role only"
        )
    return {"role": roles.pop(), "content": "\n".join(str(message["content"]) for message in messages)}


def _plain(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _check_installed() -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError(
            "the package verifiers is not installed where this rank runs: pip install 'verifiers==0.4.*' in its image"
        )
