"""A judge behind an OpenAI-compatible endpoint: an environment of kind llm_judge, asked with the prompts of the tasks.

These settings of the environment apply: its `timeout_s` and `workers`, and of its kwargs `url`, `model`, `api_key_env`,
`request` and `tries` (of a request that fails). A prompt that is asked again has another `seed` and a temperature of at least
AGAIN_TEMPERATURE.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.config import EnvironmentConfig, kind_class, read_kwargs
from pipeline.environments.environment import Environment, EnvironmentContext
from pipeline.environments.llm_judge import AGAIN_TEMPERATURE, LLMJudge, NoReply
from pipeline.evaluation.judge import JudgeReply, JudgeRequest
from pipeline.recipe.problems import RecipeError


class EndpointJudge:
    """A judge behind an endpoint. It sends its requests in threads."""

    def __init__(self, key: str, environment: EnvironmentConfig) -> None:
        """Bind to the environment at `key`, of kind llm_judge. Raises RecipeError for kwargs that do not fit."""
        arguments, problems = read_kwargs(f"{key}.kwargs", str(environment.kind), environment.kwargs)
        if problems:
            raise RecipeError(*problems)
        context = EnvironmentContext(environment.timeout_s, environment.workers, _no_other)
        self._endpoint: LLMJudge = kind_class(environment.kind).build(arguments, context)
        self._again = {"temperature": max(AGAIN_TEMPERATURE, float(arguments.request.get("temperature", 0)))}
        self._threads = ThreadPoolExecutor(self._endpoint.workers, "judge")
        self._replies: queue.SimpleQueue[JudgeReply] = queue.SimpleQueue()
        self._open = 0

    def submit(self, requests: Sequence[JudgeRequest]) -> None:
        """Send requests to the judge without waiting for the replies."""
        self._open += len(requests)
        for request in requests:
            self._threads.submit(lambda request=request: self._replies.put(self._ask(request)))

    def take(self, wait: bool) -> list[JudgeReply]:
        """Return the replies that have arrived. With `wait`, wait for at least one reply if a request is open."""
        replies: list[JudgeReply] = []
        while self._open:
            try:
                replies.append(self._replies.get(block=wait and not replies))
            except queue.Empty:
                break
            self._open -= 1
        return replies

    def close(self) -> None:
        """End the threads and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        self._endpoint.close()

    def _ask(self, request: JudgeRequest) -> JudgeReply:
        fields: dict[str, Any] = {"seed": request.attempt, **self._again} if request.attempt else {}
        try:
            text, finish = self._endpoint.ask(request.prompt, fields)
        except NoReply as error:
            return JudgeReply(request.id, failure=str(error), busy=error.busy)
        except Exception as error:  # else nobody would ever get a reply
            return JudgeReply(request.id, failure=f"{type(error).__name__}: {error}", busy=True)
        return JudgeReply(request.id, text, finish)


def _no_other(name: str) -> Environment:
    raise AssertionError("an endpoint asks no other environment")
