"""Episodes in which the policy calls tools until it answers; another environment judges the answer.

A turn with calls in it is answered with their results, one without is the final answer. What the policy does wrong (a call that
is no JSON, a tool that there is not, a division by zero) it is told as `error: ...`, and so it is that a tool did not end in
time, whether the tool says so or its thread has to be left behind. A tool that raises anything else fails the step.

Leaves out: calls that run at the same time.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pipeline.environments.base import Environment, Outcome, WornOut
from pipeline.environments.tool import Tool, ToolError, ToolSession
from pipeline.environments.tool_calls import Call, CallFormat
from pipeline.types import Prompt

WORKERS = 16
OWN_SHARE = 0.9  # of the time left, for a tool that ends itself in time to do so before its thread is left behind
MAX_LEFT_BEHIND = 64  # threads of calls that have not ended, on one engine; no call begins beside so many
TYPES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


@dataclass
class ToolEpisode:
    judged: Any  # the judge's episode
    sessions: dict[str, ToolSession] = field(default_factory=dict)  # of the tools called so far
    calls: int = 0
    errors: int = 0


class Tools(Environment):
    """Metrics: those of the judge, `calls`, and `call_errors`, calls that were answered with an error. An episode that ends
    before the final answer has reward 0 and `accuracy` 0.

    timeout_s: for all calls of one turn. limit: characters of one result; what is beyond is cut, with a mark. max_calls: of one
    turn; further ones are answered with an error. workers: None: WORKERS, or as many as the judge has, if that is less. They
    are never more, so that no final answer waits for the judge, which would be in its step's time. Raises ValueError for more.
    """

    def __init__(
        self,
        tools: dict[str, Tool],
        calls: CallFormat,
        judge: Environment,
        timeout_s: float,
        limit: int,
        max_calls: int,
        workers: int | None,
    ) -> None:
        if workers is not None and workers > judge.workers:
            raise ValueError(f"workers: {workers} are more than the judge has, which are {judge.workers}")
        self.workers = workers or min(WORKERS, judge.workers)
        self._tools, self._format, self._judge = tools, calls, judge
        self._timeout_s, self._limit, self._max_calls = timeout_s, limit, max_calls
        self._left_behind: list[threading.Thread] = []
        self._counting = threading.Lock()

    def reset(self, prompt: Prompt) -> ToolEpisode:
        return ToolEpisode(self._judge.reset(prompt))

    def step(self, episode: ToolEpisode, text: str) -> Outcome:
        calls = self._format.calls(text)
        if not calls:
            for session in episode.sessions.values():
                session.close()
            outcome = self._judge.step(episode.judged, text)
            return Outcome(outcome.reward, {**outcome.metrics, **_metrics(episode)}, outcome.observation)
        deadline = time.monotonic() + self._timeout_s
        results = []
        for number, call in enumerate(calls):
            episode.calls += 1
            try:
                if number >= self._max_calls:
                    raise ToolError(f"more than {self._max_calls} calls in one turn")
                results.append(_cut(self._answer(episode, call, deadline), self._limit))
            except (ToolError, TimeoutError) as error:
                episode.errors += 1
                results.append(_cut(f"error: {error}", self._limit))
        return Outcome(0.0, {"accuracy": 0.0, **_metrics(episode)}, self._format.message(results[: self._max_calls + 1]))

    def close(self) -> None:
        self._judge.close()

    def _answer(self, episode: ToolEpisode, call: Call, deadline: float) -> str:
        if call.error:
            raise ToolError(call.error)
        if call.name not in self._tools:
            raise ToolError(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
        tool = self._tools[call.name]
        _check(tool.parameters, call.arguments)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(self._too_slow())
        self._check_left_behind()
        if call.name not in episode.sessions:
            episode.sessions[call.name] = tool.open()
        answer: Future[str] = Future()
        arguments = (episode.sessions[call.name], call, OWN_SHARE * left, answer)
        thread = threading.Thread(target=_carry_out, args=arguments, name=f"tool {call.name}", daemon=True)
        thread.start()
        try:
            return answer.result(left)
        except TimeoutError as error:
            if not answer.done():
                del episode.sessions[call.name]  # which may be in the midst of the call still; the next one gets another
                with self._counting:
                    self._left_behind.append(thread)
            raise TimeoutError(str(error) or self._too_slow()) from None

    def _check_left_behind(self) -> None:
        """Nothing can end a thread. Raises WornOut if there are too many, rather than fill the node with them."""
        with self._counting:
            self._left_behind = [one for one in self._left_behind if one.is_alive()]
            if len(self._left_behind) >= MAX_LEFT_BEHIND:
                last = self._left_behind[-1].name
                raise WornOut(f"{len(self._left_behind)} calls of tools have not ended, the last of {last}")

    def _too_slow(self) -> str:
        return f"the tool did not answer within {self._timeout_s:g} s"


def _carry_out(session: ToolSession, call: Call, timeout_s: float, answer: Future[str]) -> None:
    try:
        answer.set_result(session.call(call.arguments, timeout_s))
    except BaseException as error:
        answer.set_exception(error)


def _check(parameters: dict[str, type], arguments: dict[str, Any]) -> None:
    if set(arguments) != set(parameters):
        raise ToolError(f"the arguments are: {', '.join(parameters)}; not: {', '.join(arguments) or 'none'}")
    for name, kind in parameters.items():
        value = arguments[name]
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ToolError(f"argument {name} is {TYPES[kind]}")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n... ({len(text) - limit} characters cut)"


def _metrics(episode: ToolEpisode) -> dict[str, float]:
    return {"calls": float(episode.calls), "call_errors": float(episode.errors)}
