"""Run a user's rollout function or an agent in a judge.

A call of a function brings completions, and ends when the function waits for others. A call of an agent ends when the agent
asks for draws or has ended; its completions come in between (`FunctionStepper.deliver`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeline.environments.environment import AnsweredTurn, Environment, EpisodeFailed, Outcome
from pipeline.rollout.agents.agent_function import AgentFunction, AgentResult
from pipeline.rollout.engine_client import DrawnTurn, EngineClient, EpisodeEnded, RolloutFunction
from pipeline.rollout.function_messages import FunctionCall, FunctionReply, TurnVerdict
from pipeline.rollout.judges.conversation_text import ConversationText
from pipeline.rollout.judges.environment_steps import (
    AGENT,
    AGENT_BEGIN,
    FUNCTION,
    FUNCTION_BEGIN,
    GOES_ON,
    WAITS,
    Begin,
    StepOutcome,
    checked_outcome,
    judge_answer,
)
from pipeline.rollout.seeds import sampling_seed
from pipeline.types import Prompt

ROUNDS = 3
"""Rounds of the event loop after which a call ends, so that draws that begin together are sent together."""


@dataclass(frozen=True, slots=True)
class _OpenEpisode:
    client: EngineClient
    task: asyncio.Task[Any]


class FunctionStepper:
    """Runs a rollout function for the episodes of a judge, in the event loop of its process."""

    def __init__(
        self,
        function: RolloutFunction | AgentFunction,
        environment: Environment,
        text: ConversationText,
        max_steps: int = 0,
    ) -> None:
        self.environment, self._function, self._text, self._max_steps = environment, function, text, max_steps
        self._is_agent = isinstance(function, AgentFunction)
        self._open: dict[str, _OpenEpisode] = {}
        self._lock = asyncio.Lock()  # episodes may share the environment

    async def step(self, call: FunctionCall, begin: Begin) -> StepOutcome:
        """Run an episode's function until it waits for completions or returns. Raises its errors, and those of its result.

        begin: called with the name of each part of the call when the part begins.
        """
        if call.prompt is not None:
            begin("reset")
            await self._begin(call, begin)
        else:
            begin(self._part(self._open[call.episode]))
        episode = self._open[call.episode]
        episode.client.deliver(call.completions, call.cut)
        await _settle(episode, self._is_agent)
        if not episode.task.done():
            draws, episode.client.unsent = tuple(episode.client.unsent), []
            episode.client.asked.clear()
            begin(self._part(episode))
            return StepOutcome(0.0, {}, False, GOES_ON, function=FunctionReply(draws))
        try:
            turns = episode.task.result()
        except EpisodeEnded as ended:
            return _ended(episode.client, ended.turn)
        if isinstance(turns, AgentResult):
            return _outcome_of_agent(turns)
        try:
            return _outcome(episode.client.checked(turns))
        except (TypeError, ValueError) as error:
            raise EpisodeFailed(str(error)) from None

    def deliver(self, message: FunctionCall, begin: Begin) -> None:
        """Give an agent completions while a call waits for its next draws, or cut it."""
        if episode := self._open.get(message.episode):
            episode.client.deliver(message.completions, message.cut)
            begin(self._part(episode))

    def _part(self, episode: _OpenEpisode) -> str:
        """Return the part of a call that goes on: an agent's time runs only while the engine draws nothing for it."""
        if not self._is_agent:
            return FUNCTION
        return WAITS if episode.client.outstanding else AGENT

    async def _begin(self, call: FunctionCall, begin: Begin) -> None:
        prompt, settings = call.prompt, call.settings
        assert prompt is not None and settings is not None  # of a first call
        state = await self._in_thread(self.environment.reset, prompt)

        async def judge(text: str, tokens: tuple[int, ...]) -> Outcome:
            answer = AnsweredTurn(text, tokens, settings.step, self._max_steps)
            return await self._in_thread(judge_answer, self.environment, state, answer)

        client = EngineClient(prompt, settings, judge, self._text)
        begin(AGENT_BEGIN if self._is_agent else FUNCTION_BEGIN)
        seed = sampling_seed(settings.seed, settings.purpose, prompt.index, settings.sample)
        self._open[call.episode] = _OpenEpisode(client, asyncio.ensure_future(self._play(client, prompt, seed)))

    async def _play(self, client: EngineClient, prompt: Prompt, seed: int) -> Any:
        try:
            return await self._function(client, prompt, seed)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the event loop
            raise RuntimeError(type(error).__name__) from error

    async def _in_thread(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of an environment's method, which may run an event loop of its own; one call at a time."""
        async with self._lock:
            return await asyncio.to_thread(method, *arguments)

    def forget(self, episode: str) -> None:
        """End the function of an episode that has ended."""
        if opened := self._open.pop(episode, None):
            opened.task.cancel()
            opened.client.close()


async def _settle(episode: _OpenEpisode, is_agent: bool) -> None:
    """Let a function run until it has ended or waits for the engine; an agent, until it has ended or asks for draws."""
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
    if episode.task.done() or (episode.client.unsent if is_agent else episode.client.outstanding):
        return
    asked = asyncio.ensure_future(episode.client.asked.wait())
    await asyncio.wait({episode.task, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


def _outcome(turns: list[DrawnTurn], truncated: bool = False) -> StepOutcome:
    reward, last = math.fsum(turn.reward or 0.0 for turn in turns), turns[-1]
    verdicts = tuple(TurnVerdict(float(turn.reward or 0.0), bool(turn.malformed)) for turn in turns)
    reply = FunctionReply(last=last.number, truncated=truncated, verdicts=verdicts)
    judged = checked_outcome(Outcome(reward, last.metrics, extracted=last.extracted))
    return replace(judged, function=reply)


def _outcome_of_agent(result: AgentResult) -> StepOutcome:
    judged = checked_outcome(result.outcome)
    if not result.ends:
        return replace(judged, function=FunctionReply())
    verdicts = tuple(TurnVerdict(reward, False) for reward in result.outcome.of_turns)
    reply = FunctionReply(last=result.ends[-1], others=result.ends[:-1], truncated=result.truncated, verdicts=verdicts)
    return replace(judged, function=reply)


def _ended(client: EngineClient, turn: DrawnTurn | None) -> StepOutcome:
    """Return the outcome of an episode that can draw no further turn: the conversation so far, if it is rewarded."""
    try:
        return _outcome(client.checked(turn.conversation if turn else []), truncated=True)
    except ValueError:  # no reward yet, or not the prompt's conversation
        return StepOutcome(0.0, {}, True, None, function=FunctionReply())
