"""Send groups to engines and receive them; each group goes to the engine with the least outstanding work.

A group is never split, so that its members run on one engine and share the prompt's keys and values. Idle engines get groups
round robin. All groups that go to one engine at one time are one message, and the engine receives all its requests before it
takes another step. So a synchronous training step has the same batches, whatever the timing of messages, and has the same
results to the last bit on CPUs, or on GPUs with policy.deterministic.

Groups that have been sent are never moved, and no piece of work is smaller than a group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.roles import GenerateRole
from pipeline.rollout.failures import FailureMonitor
from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork, UnfinishedGroup
from pipeline.rpc import Future, RpcGroup, StreamingReply
from pipeline.types import Prompt, Rollout, RolloutGroup, Sampling

FinishedRollouts = Mapping[int, dict[int, Rollout]]
"""Prompt index -> sample -> rollout, for rollouts that need not be sampled again."""


@dataclass(frozen=True)
class RolloutSpec:
    """Settings for sampling groups."""

    purpose: str  # "train" or "val"
    samples: int  # episodes of each prompt
    sampling: Sampling
    urgent: bool = False  # goes before work that has not begun
    apart: bool = False  # send each group as a message of its own, so that it can be cut alone


@dataclass
class SentMessage:
    """A message to an engine, and its groups that have not come back."""

    engine: int
    spec: RolloutSpec
    prompts: list[Prompt]
    future: Future[StreamingReply[FinishedGroup]]
    open: set[int] = field(default_factory=set)  # indices into `prompts` of groups that have not come back


class Dispatcher:
    """Sends groups to engines and receives them."""

    def __init__(self, engines: Sequence[RpcGroup[GenerateRole]], seed: int, max_turns: int, failures: FailureMonitor | None):
        """Bind to the engines, one group of ranks each. failures: None if failed episodes never end the run."""
        self._engines = engines
        self._seed = seed
        self._max_turns = max_turns
        self._failures = failures
        self._numbers = 0
        self._sent: dict[int, SentMessage] = {}  # by work number
        self._received: dict[str, list[RolloutGroup]] = {}  # by purpose
        self._waited_s = 0.0
        self._received_counts = [0] * len(engines)  # groups received, by engine

    @property
    def outstanding(self) -> list[int]:
        """For each engine, the number of episodes in groups that have not come back."""
        episodes = [0] * len(self._engines)
        for message in self._sent.values():
            episodes[message.engine] += len(message.open) * message.spec.samples
        return episodes

    def send(
        self, prompts: Sequence[Prompt], spec: RolloutSpec, finished: FinishedRollouts | None = None, step: int = 0
    ) -> None:
        """Send groups to the engines.

        finished: prompt index -> sample -> rollout, for rollouts of these groups that an earlier run has finished. step: number
        of completed steps.
        """
        episodes = self.outstanding
        shares: list[list[Prompt]] = [[] for _ in self._engines]
        for prompt in prompts:
            engine = episodes.index(min(episodes))
            shares[engine].append(prompt)
            episodes[engine] += spec.samples
        for engine, share in enumerate(shares):
            for message in [[prompt] for prompt in share] if spec.apart else [share] * bool(share):
                self._send(engine, message, spec, finished or {}, step)

    def _send(self, engine: int, prompts: list[Prompt], spec: RolloutSpec, finished: FinishedRollouts, step: int) -> None:
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
            {i: finished[prompt.index] for i, prompt in enumerate(prompts) if prompt.index in finished},
            step,
        )
        future = self._engines[engine].call(GenerateRole.rollout, work)
        self._sent[number] = SentMessage(engine, spec, prompts, future, set(range(len(prompts))))

    def receive(self, block: bool = True) -> None:
        """Receive the replies that have arrived; with `block` wait for at least one.

        Raises RuntimeError if too many episodes failed.
        """
        start = time.perf_counter()
        while self._engines[0].receive_replies(block=block):  # replies of any engine
            block = False
        self._waited_s += time.perf_counter() - start
        for number, message in list(self._sent.items()):
            for _, parts in message.future.take():
                for part in parts:
                    message.open.remove(part.group_index)
                    self._received_counts[message.engine] += 1
                    if self._failures:
                        self._failures.record(part.group)
                    self._received.setdefault(message.spec.purpose, []).append(part.group)
            if not message.open:
                del self._sent[number]

    def take(self, purpose: str) -> list[RolloutGroup]:
        """Return the groups received since the last call, in the order of completion."""
        return self._received.pop(purpose, [])

    def take_received_counts(self) -> list[int]:
        """Return for each engine the number of groups received since the last call."""
        counts, self._received_counts = self._received_counts, [0] * len(self._engines)
        return counts

    def take_waited_s(self) -> float:
        """Return the seconds that rank 0 has waited in `receive` since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def wait_for(self, prompts: Sequence[Prompt], purpose: str) -> list[RolloutGroup]:
        """Return the prompts' groups, in their order. No other group of this purpose may be in progress."""
        received: list[RolloutGroup] = []
        while len(received) < len(prompts):
            self.receive()
            received += self.take(purpose)
        groups = {group.prompt.index: group for group in received}
        return [groups[prompt.index] for prompt in prompts]

    def drain(self) -> None:
        """Wait until every episode that has begun has ended. No episode begins before the next version is served."""
        for draining in [engine.call(GenerateRole.drain) for engine in self._engines]:
            draining.result()
        self.receive(block=False)

    def cut(self, prompts: Sequence[Prompt]) -> None:
        """End the open episodes of these groups in their present state. Only for groups that were sent `apart`."""
        indexes = {prompt.index for prompt in prompts}
        for number, engine in enumerate(self._engines):
            works = [
                key
                for key, message in self._sent.items()
                if message.engine == number and message.spec.apart and message.prompts[0].index in indexes
            ]
            if works:
                engine.call(GenerateRole.cut, works).result()

    def snapshot(self, purpose: str) -> dict[int, UnfinishedGroup]:
        """Return prompt index -> state, for the groups that have not come back.

        Receives groups that complete meanwhile.
        """
        replies = [
            reply for future in [engine.call(GenerateRole.snapshot) for engine in self._engines] for reply in future.result()
        ]
        self.receive(block=False)
        states = {}
        for unfinished in (group for reply in replies for group in reply):
            message = self._sent.get(unfinished.number)
            if message and message.spec.purpose == purpose and unfinished.group_index in message.open:
                states[message.prompts[unfinished.group_index].index] = unfinished
        return states
