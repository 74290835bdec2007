"""Build environments and take their steps as a run does: in the pool's threads, each within its time limit."""

import threading
from typing import Any

from pipeline.config import EnvironmentConfig
from pipeline.environments.build_environments import build
from pipeline.environments.environment import Environment, Outcome
from pipeline.rollout.environment_pool import Begin, Call, CallFailure, EnvironmentPool
from pipeline.types import Prompt


def made(kind: str, timeout_s: float = 10.0, workers: int | None = None, **kwargs: Any) -> Any:
    """Return an environment of a kind, built from a recipe's `kwargs`."""
    return build({"x": EnvironmentConfig(kind=kind, timeout_s=timeout_s, workers=workers, kwargs=kwargs)})["x"]


def outcomes(environment: Environment, limit_s: float, prompt: Prompt, texts: list[str]) -> list[Outcome | CallFailure]:
    """Return the outcomes of one-turn episodes, one for each text, all of which are submitted at once."""
    wakeup = threading.Event()
    pool = EnvironmentPool({"it": environment}, {"it": limit_s}, wakeup, grace_s=0.0)
    for number, text in enumerate(texts):
        pool.submit("it", number, _call(environment, prompt, text))
    answers: dict[int, Outcome | CallFailure] = {}
    while len(answers) < len(texts):
        wakeup.wait(pool.seconds_left())
        wakeup.clear()
        answers |= pool.take()
    return [answers[number] for number in range(len(texts))]


def _call(environment: Environment, prompt: Prompt, text: str) -> Call:
    def call(begin: Begin) -> Outcome:
        begin("reset")
        episode = environment.reset(prompt)
        begin("step")
        return environment.step(episode, text)

    return call
