"""Estimate the time of a step from its phases, and the idle time of each component.

    in turn      rollout, training and refit follow each other
    drained      sampling runs ahead, and a refit waits for the engines: the longer of rollout and training, then the refit
    in flight    a refit does not wait for the engines; `simulate_steps` simulates the loop of rank 0 with one engine

The simulation follows `pipeline/coordination/buffer.py` with `stragglers: wait`: at most max_trajectory_age_steps + 1 rollouts
are in flight, each refit starts a rollout, and a step waits for the oldest rollout. The last answers of a rollout therefore
overlap with the first answers of the next one. A sequence starts when another ends; those of the oldest rollout start first.

Not counted: groups that end together, prompts that move to other engines, `stragglers: keep` and `cut`, which wait for less.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from launch.plan.generate_time import EngineLoad, decoding
from pipeline.config import Recipe, ahead, colocated, runs_ahead

BUNDLES = 200  # bundles of sequences that are assumed to have one length
OLDEST = 8  # maximum number of rollouts ahead: with more, still no step waits for a long answer
WARM_UP = 3  # steps to simulate first, besides one for each rollout in flight
ROUNDS = 4  # measured rounds, each of one step for each rollout in flight


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and the seconds of it in which each component is idle."""

    step: float
    train: float = 0.0
    generate: float = 0.0


def estimate(recipe: Recipe, seconds: Mapping[str, float], sampling: float, load: EngineLoad | None) -> StepTime:
    """Return the seconds of a step and the idle seconds of each component.

    seconds: clock -> seconds of its phases. sampling: the seconds of a rollout on the engines; in the rest of the rollout other
    ranks score answers, and the train ranks wait for them. load: the answers that an engine decodes in a rollout; None for an
    algorithm that does not sample.
    """
    rollout, train, refit = (seconds.get(clock, 0.0) for clock in ("rollout", "train", "refit"))
    if load is None or colocated(recipe):
        return StepTime(rollout + train + refit)
    if not runs_ahead(recipe):
        return StepTime(rollout + train + refit, rollout, train)
    section, scoring = ahead(recipe), rollout - sampling
    if not section.in_flight_weight_updates:
        longer = max(rollout, train)
        return StepTime(longer + refit, longer - train, longer - rollout)
    step, busy = simulate_steps(load, sampling, scoring + train, refit, section.max_trajectory_age_steps)
    return StepTime(step, max(0.0, step - train - refit), max(0.0, step - busy - refit))


def simulate_steps(load: EngineLoad, sampling: float, train: float, refit: float, age: int) -> tuple[float, float]:
    """Return (seconds of a step, seconds of it in which an engine decodes).

    sampling: seconds of a rollout that runs alone on the engine. train: seconds from a complete rollout to the refit.
    age: how many steps sampling runs ahead, at least 1.
    """
    alone = sum(decoding(load.engine, load.count, load.slots, load.lengths, load.answers).values())
    queue, live = _EngineSimulation(load, sampling / alone), min(age, OLDEST) + 1
    for _ in range(live):
        queue.begin()
    warm, measured = live + WARM_UP, ROUNDS * live
    since = 0.0, 0.0
    for step in range(warm + measured):
        if step == warm:
            since = queue.time, queue.busy
        queue.run(rollout=step)
        queue.run(until=queue.time + train)
        queue.time += refit
        queue.begin()
    return (queue.time - since[0]) / measured, (queue.busy - since[1]) / measured


class _EngineSimulation:
    """A simulated engine that decodes rollouts, which begin one after another."""

    def __init__(self, load: EngineLoad, scale: float):
        """scale: the ratio of an engine's step to the sum of its estimated parts."""
        self.time = 0.0
        self.busy = 0.0
        self._load, self._scale = load, scale
        self._lengths = _lengths(load)
        self._weight = load.count / len(self._lengths)  # sequences in a bundle
        self._left: list[int] = []  # bundles that have not ended, by rollout
        self._waiting: deque[tuple[int, float]] = deque()  # (rollout, tokens)
        self._running: list[tuple[float, int, float]] = []  # a heap of (clock at its end, rollout, clock at its start)
        self._clock = 0.0  # tokens that a sequence running since the beginning would have
        self._begun = 0.0  # sum of the running sequences' clocks at their start

    def begin(self) -> None:
        self._waiting.extend((len(self._left), length) for length in self._lengths)
        self._left.append(len(self._lengths))
        self._admit()

    def run(self, rollout: int | None = None, until: float = math.inf) -> None:
        """Decode until rollout number `rollout` has ended, or until the time `until`.

        If no sequences are left, only the time advances.
        """
        while self._running and self.time < until and (rollout is None or self._left[rollout]):
            count, tokens = len(self._running), self._running[0][0] - self._clock
            context = self._load.lengths.prompt + self._clock - self._begun / count + tokens / 2
            batch = min(count * self._weight, self._load.slots)
            step = self._scale * sum(self._load.engine.parts(batch, context).values())
            tokens = min(tokens, (until - self.time) / step)
            self._clock += tokens
            self.time += tokens * step
            self.busy += tokens * step
            while self._running and self._running[0][0] <= self._clock * (1 + 1e-12):
                _, rollout_number, begin_clock = heapq.heappop(self._running)
                self._left[rollout_number] -= 1
                self._begun -= begin_clock
            self._admit()
        if until < math.inf:
            self.time = until

    def _admit(self) -> None:
        while self._waiting and (not self._running or (len(self._running) + 1) * self._weight <= self._load.slots):
            rollout, length = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + length, rollout, self._clock))
            self._begun += self._clock


def _lengths(load: EngineLoad) -> list[float]:
    """Return the length in tokens of each bundle of an engine's answers, in random order. A bundle's answers are equally long.

    The lengths are quantiles of the assumed distribution, and the longest answer of all engines. If a bundle has more answers
    than the engine has slots, its length is scaled up by the ratio of both.
    """
    lengths, count = load.lengths, min(BUNDLES, math.ceil(load.count))
    quantiles = (-math.log1p(-(i + 0.5) / count) for i in range(count - 1))
    lengths_at = [lengths.limit if math.isinf(lengths.scale) else min(lengths.limit, lengths.scale * q) for q in quantiles]
    lengths_at.append(lengths.longest(load.answers))
    random.Random(0).shuffle(lengths_at)
    return [length * max(1.0, load.count / count / load.slots) for length in lengths_at]
