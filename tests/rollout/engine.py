"""Provide an engine with a tiny model, a driver on it, and environments for tests."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.environments.environment import Environment, Outcome
from pipeline.generate.transformers import TransformersBackend
from pipeline.rollout.driver import EpisodeDriver
from pipeline.rollout.judges.environment_steps import CallFailure, EnvStepper, StepOutcome, StepRequest, failure_of
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.lockstep import Lockstep
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.types import Prompt, Rollout, Sampling
from tests.generate.tiny import MAX_MODEL_LEN, VOCAB, Checkpoint, load, policy


class Noted:
    """A backend that records its calls. Before each step it calls `before_step` with the number of earlier steps."""

    def __init__(self, engine: TransformersBackend):
        self._engine = engine
        self.calls: list[tuple[str, object]] = []
        self.steps = 0
        self.before_step: Callable[[int], None] = lambda steps: None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add(self, requests):
        self.calls.append(("add", [request.id for request in requests]))
        self._engine.add(requests)

    def cut(self, ids):
        self.calls.append(("cut", list(ids)))
        return self._engine.cut(ids)

    def step(self):
        self.before_step(self.steps)
        self.calls.append(("step", self.pending))
        self.steps += 1
        return self._engine.step()

    @property
    def added(self) -> list[list[str]]:
        return [ids for name, ids in self.calls if name == "add"]


class ThreadJudges:
    """A `JudgePool` with environments in threads of this process, without limits: a test sees what they do and decides when."""

    def __init__(self, environments: dict[str, Environment], tokenizer, observations, wakeup: threading.Event):
        self._lock = threading.Lock()  # released in the environments' methods: a tokenizer is not thread-safe
        self._steppers = {
            name: EnvStepper(_Unlocked(environment, self._lock), tokenizer, observations)
            for name, environment in environments.items()
        }
        self._wakeup = wakeup
        self._threads = {name: ThreadPoolExecutor(environment.workers) for name, environment in environments.items()}
        self._answers: queue.SimpleQueue[tuple[str, StepOutcome | CallFailure]] = queue.SimpleQueue()

    def submit(self, request: StepRequest) -> None:
        self._threads[request.environment].submit(self._judge, request)

    def _judge(self, request: StepRequest) -> None:
        parts = []
        try:
            with self._lock:
                answer = self._steppers[request.environment].step(request, parts.append)
        except BaseException as error:
            answer = failure_of(error, parts[-1])
        self._answers.put((request.episode, answer))
        self._wakeup.set()

    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def seconds_left(self) -> None:
        return None

    def forget(self, episode: str) -> None:
        for stepper in self._steppers.values():
            stepper.forget(episode)

    def close(self) -> None:
        pass


class _Unlocked(Environment):
    def __init__(self, environment: Environment, lock: threading.Lock):
        self._environment, self._lock = environment, lock

    def reset(self, prompt):
        return self._run(self._environment.reset, prompt)

    def step(self, episode, text):
        return self._run(self._environment.step, episode, text)

    def _run(self, method, *arguments):
        self._lock.release()
        try:
            return method(*arguments)
        finally:
            self._lock.acquire()


class NoWorld:
    """The driver needs a world only to record its phases."""

    def __init__(self):
        self.phases: list[str] = []

    @contextmanager
    def phase(self, phase: str, verb: str | None = None):
        self.phases.append(phase)
        yield


@functools.cache
def _engine(folder: Path) -> TransformersBackend:
    return TransformersBackend(policy(folder, "transformers"))


class Bench:
    """One engine of one rank, and its driver."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        environments: dict[str, Environment] | Callable[[threading.Event], JudgePool],
        max_num_seqs: int = 32,
        broken_rewards: dict[str, float] | None = None,
        function: str = "",
    ):
        """environments: run in threads of this process; or a function from its wakeup to their judges."""
        engine = _engine(checkpoint.folder)
        load(engine, checkpoint.weights().items(), version=7)
        engine.cut(list(engine.progress()))  # left over by a test
        self.engine = Noted(engine)
        self.world = NoWorld()
        self.wakeup = threading.Event()
        if callable(environments):
            executor = environments(self.wakeup)
        else:
            tokenizer = load_tokenizer(TokenizerConfig(name=str(checkpoint.folder)))
            observations = Observations(tokenizer, TokenizerConfig(name=str(checkpoint.folder)), chat=False)
            executor = ThreadJudges(environments, tokenizer, observations, self.wakeup)
        lockstep = Lockstep(None)
        parts = self.engine, executor, lockstep, self.world, self.wakeup
        self.driver = EpisodeDriver(*parts, max_num_seqs, MAX_MODEL_LEN, broken_rewards, function)

    def work(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until a verb waits, or all is done."""
        self.driver.work(until)

    def run(self, *given: Any, **options: Any) -> tuple[Any, list[Rollout]]:
        """Run a work to its end. Return its answer and the first rollout of each of its groups."""
        later = self.driver.rollout(work(*given, **options))
        self.work()
        return later, [rollouts[0] for _, rollouts in sorted(by_place(later.unsent).items())]

    def after(self, steps: int) -> None:
        """Step until the engine has made that many steps in all."""
        self.work(lambda: self.engine.steps >= steps)


def prompts(count: int, environment: str = "told", first: int = 0) -> list[Prompt]:
    random = np.random.default_rng(5)
    lengths = range(3, 3 + count)
    return [
        Prompt(first + i, random.integers(2, VOCAB, length).astype(np.int32), environment, {"answer": str(i)})
        for i, length in enumerate(lengths)
    ]


def work(number: int, prompts: list[Prompt], samples: int = 2, max_new_tokens: int = 6, stop=(), **rest) -> RolloutWork:
    return RolloutWork(
        number, prompts, samples, "train", 42, Sampling(max_new_tokens=max_new_tokens, stop_token_ids=stop), **rest
    )


def by_place(parts) -> dict[int, tuple[Rollout, ...]]:
    """Return the answers."""
    return {part.group_index: part.group.rollouts for part in parts}


class FixedTurns(Environment):
    """Answers every turn with a word and rewards each with 1, except the last of `turns`, which ends the episode."""

    workers = 3

    def __init__(self, turns: int):
        self.turns = turns

    def reset(self, prompt):
        return {"turn": 0}

    def step(self, episode, text):
        episode["turn"] += 1
        if episode["turn"] == self.turns:
            return Outcome(0.0, {"turns": episode["turn"]})
        return Outcome(1.0, {"turns": episode["turn"]}, {"role": "user", "content": f"w{20 + episode['turn']}"})
