"""Send groups to engines and take them back: each goes to the engine with the least outstanding work.

A group is never split, so that its members are beside each other and share the prompt's keys and values. Between idle engines
groups go round robin. What goes to one engine at one moment is one message, whose requests are all in the engine before it
takes another step: a synchronous step is then the same to the last bit however messages travel.

Left out: moving groups that have been sent, and pieces of work that are smaller than a group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.rollout.failures import FailureMonitor
from pipeline.rollout.work import RolloutWork, UnfinishedGroup
from pipeline.rpc import Future, RpcGroup
from pipeline.types import Prompt, Rollout, RolloutGroup, Sampling

FinishedRollouts = Mapping[int, dict[int, Rollout]]
"""By prompt index and sample: rollouts that need not be done again."""


@dataclass(frozen=True)
class RolloutSpec:
    """The way in which groups are sampled."""

    purpose: str  # "train" or "val"
    samples: int  # episodes of each prompt
    sampling: Sampling
    urgent: bool = False  # before what has not begun
    apart: bool = False  # each group is a message of its own, so that it can be cut without the others


@dataclass
class SentMessage:
    """One message, and the groups of it that have not come back."""

    engine: int
    spec: RolloutSpec
    prompts: list[Prompt]
    future: Future
    open: set[int] = field(default_factory=set)  # places in `prompts`


class Dispatcher:
    def __init__(self, engines: Sequence[RpcGroup], seed: int, max_turns: int, failures: FailureMonitor):
        """engines: one for the ranks of each."""
        self._engines = engines
        self._seed = seed
        self._max_turns = max_turns
        self._failures = failures
        self._numbers = 0
        self._sent: dict[int, SentMessage] = {}  # by the work's number
        self._came: dict[str, list[RolloutGroup]] = {}  # by purpose
        self._waited_s = 0.0
        self._answered = [0] * len(engines)  # groups

    @property
    def outstanding(self) -> list[int]:
        """By engine: the number of episodes in groups that have not come back."""
        episodes = [0] * len(self._engines)
        for sent in self._sent.values():
            episodes[sent.engine] += len(sent.open) * sent.spec.samples
        return episodes

    def send(self, prompts: Sequence[Prompt], spec: RolloutSpec, finished: FinishedRollouts | None = None) -> None:
        """Send groups to the engines. finished: of groups that were begun earlier the rollouts by sample, by their prompt's
        index."""
        episodes = self.outstanding
        shares: list[list[Prompt]] = [[] for _ in self._engines]
        for prompt in prompts:
            engine = episodes.index(min(episodes))
            shares[engine].append(prompt)
            episodes[engine] += spec.samples
        for engine, share in enumerate(shares):
            for message in [[prompt] for prompt in share] if spec.apart else [share] * bool(share):
                self._send(engine, message, spec, finished or {})

    def _send(self, engine: int, prompts: list[Prompt], spec: RolloutSpec, finished: FinishedRollouts) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        work = RolloutWork(
            number,
            prompts,
            spec.samples,
            spec.purpose,
            self._seed,
            spec.sampling,
            self._max_turns,
            spec.urgent,
            {place: finished[prompt.index] for place, prompt in enumerate(prompts) if prompt.index in finished},
        )
        future = self._engines[engine].rollout(work)
        self._sent[number] = SentMessage(engine, spec, prompts, future, set(range(len(prompts))))

    def receive(self, block: bool = True) -> None:
        """Take in what has come; with `block` wait until something does. Raises RuntimeError if too many episodes failed."""
        begun = time.perf_counter()
        while self._engines[0].receive_replies(block=block):  # of any engine
            block = False
        self._waited_s += time.perf_counter() - begun
        for number, sent in list(self._sent.items()):
            for _, parts in sent.future.take():
                for part in parts:
                    sent.open.remove(part.place)
                    self._answered[sent.engine] += 1
                    self._failures.record(part.group)
                    self._came.setdefault(sent.spec.purpose, []).append(part.group)
            if not sent.open:
                del self._sent[number]

    def take(self, purpose: str) -> list[RolloutGroup]:
        """Return the groups that were taken in since the last call, in the order in which they completed."""
        return self._came.pop(purpose, [])

    def take_answered(self) -> list[int]:
        """Return by engine the number of groups that came back since the last call."""
        answered, self._answered = self._answered, [0] * len(self._engines)
        return answered

    def take_waited_s(self) -> float:
        """Return how long rank 0 has waited in `receive` since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def wait_for(self, prompts: Sequence[Prompt], purpose: str) -> list[RolloutGroup]:
        """Return the prompts' groups, in their order. They are all that is under way with this purpose."""
        came: list[RolloutGroup] = []
        while len(came) < len(prompts):
            self.receive()
            came += self.take(purpose)
        groups = {group.prompt.index: group for group in came}
        return [groups[prompt.index] for prompt in prompts]

    def drain(self) -> None:
        """Wait until every episode that has begun has ended. No other begins before the next version is served."""
        for draining in [engine.drain() for engine in self._engines]:
            draining.result()
        self.receive(block=False)

    def cut(self, prompts: Sequence[Prompt]) -> None:
        """End the open episodes of groups that were sent apart where they are."""
        indexes = {prompt.index for prompt in prompts}
        for number, engine in enumerate(self._engines):
            works = [
                key
                for key, sent in self._sent.items()
                if sent.engine == number and sent.spec.apart and sent.prompts[0].index in indexes
            ]
            if works:
                engine.cut(works).result()

    def snapshot(self, purpose: str) -> dict[int, UnfinishedGroup]:
        """Return where the groups stand that have not come back, by their prompt's index. What completes meanwhile is taken
        in."""
        replies = [reply for asked in [engine.snapshot() for engine in self._engines] for reply in asked.result()]
        self.receive(block=False)
        stands = {}
        for unfinished in (one for reply in replies for one in reply):
            sent = self._sent.get(unfinished.number)
            if sent and sent.spec.purpose == purpose and unfinished.place in sent.open:
                stands[sent.prompts[unfinished.place].index] = unfinished
        return stands
