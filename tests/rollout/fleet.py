"""Groups, and engines that answer like `RpcGroup` when a test tells them to."""

from __future__ import annotations

from collections import deque

import numpy as np

from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork, UnfinishedGroup
from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Turn, VersionSpan
from tests.fake_group import FakeGroup


def prompts(first: int, count: int) -> list[Prompt]:
    return [Prompt(i, np.array([1, 2], np.int32), "addition", {}) for i in range(first, first + count)]


def rollout(reward: float = 0.0, tokens: int = 1, version: int = 0, failure: str = "", broke: str = "") -> Rollout:
    drawn = np.full(tokens, 3, np.int32)
    completion = Completion("", drawn, np.full(tokens, -0.5, np.float32), (VersionSpan(version, tokens),), "stop")
    return Rollout((Turn(completion),), reward, failure=failure, broke=broke)


def group(prompt: Prompt, samples: int = 2, tokens: int = 1, version: int = 0) -> RolloutGroup:
    """Return a group whose rewards vary if the prompt's index is even."""
    varied = prompt.index % 2 == 0
    return RolloutGroup(prompt, tuple(rollout(float(varied and i % 2 == 0), tokens, version) for i in range(samples)))


class Answer:
    """A Future."""

    def __init__(self, reply=None):
        self.reply = [reply]
        self.fresh = []

    def take(self):
        fresh, self.fresh = self.fresh, []
        return fresh

    def result(self):
        return self.reply


class Stream:
    def __init__(self, size: int):
        self._left = prompts(0, size)

    def take(self, n: int) -> list[Prompt]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def observe(self, groups: list[RolloutGroup]) -> None: ...


class Fleet:
    """Engines that finish groups in the order of `pick`, which gets the indexes of all open groups' prompts."""

    def __init__(self, engines: int, pick=min):
        self.engines = [Engine(self) for _ in range(engines)]
        self.pick = pick
        self.version = 0
        self.works: list[RolloutWork] = []
        self.open: dict[int, tuple[RolloutWork, int, Answer]] = {}  # by prompt index; one purpose at a time
        self.queue: deque = deque()
        self.drained = 0
        self.cut: list[int] = []

    def add(self, work: RolloutWork) -> Answer:
        answer = Answer()
        self.works.append(work)
        for place, prompt in enumerate(work.prompts):
            assert prompt.index not in self.open
            self.open[prompt.index] = (work, place, answer)
        return answer

    def finish(self, index: int) -> None:
        work, place, answer = self.open.pop(index)
        prompt = work.prompts[place]
        done = group(prompt, work.samples, tokens=1 + index % 5, version=self.version)
        kept = work.finished.get(place, {})
        rollouts = tuple(kept.get(i, one) for i, one in enumerate(done.rollouts))
        answer.fresh.append((1, [FinishedGroup(place, RolloutGroup(prompt, rollouts))]))

    def receive_replies(self, block: bool) -> bool:
        if block and not self.open:
            raise AssertionError("rank 0 waits for nothing")
        if block:
            self.finish(self.pick(self.open))
        return block


class Engine(FakeGroup):
    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.works: list[RolloutWork] = []

    def rollout(self, work: RolloutWork) -> Answer:
        self.works.append(work)
        return self.fleet.add(work)

    def receive_replies(self, block: bool) -> bool:
        return self.fleet.receive_replies(block)

    def drain(self) -> Answer:
        self.fleet.drained += 1
        return Answer()

    def cut(self, works: list[int]) -> Answer:
        """Cut. The answer means that everything that was cut has been returned."""
        self.fleet.cut += works
        for work in self.works:
            for prompt in work.prompts if work.number in works else ():
                if prompt.index in self.fleet.open:
                    self.fleet.finish(prompt.index)
        return Answer()

    def snapshot(self) -> Answer:
        stands = [
            UnfinishedGroup(
                work.number, place, {0: rollout(version=self.fleet.version)}, {1: [VersionSpan(self.fleet.version, 7)]}
            )
            for work in self.works
            for place, prompt in enumerate(work.prompts)
            if self.fleet.open.get(prompt.index, (None,))[0] is work
        ]
        return Answer(stands)
