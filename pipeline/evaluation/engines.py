"""Ask the engines of an evaluation, on rank 0.

Each engine holds as many episodes as it can decode at the same time, and as many again that wait. An engine that finishes
episodes gets new ones, so faster engines answer more questions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from pipeline.coordination.dispatch import Dispatcher, RolloutSpec
from pipeline.evaluation.judge import Judge
from pipeline.evaluation.reward_engines import RewardEngines
from pipeline.roles import GenerateRole
from pipeline.rpc import Future, RpcGroup
from pipeline.types import Likelihood, LikelihoodRequest, Prompt, Rollout, RolloutGroup

KeptSamples = Mapping[int, Collection[int]]
"""Prompt index -> numbers of the samples whose answers are kept."""

AHEAD = 2
"""Episodes that an engine holds, as a multiple of `max_num_seqs`."""
UNITS_AHEAD = 2
"""Number of units of likelihood requests that an engine holds if rank 0 is not part of it."""


class Engines:
    """The engines that serve one model."""

    def __init__(
        self, groups: Sequence[RpcGroup[GenerateRole]], max_num_seqs: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Bind to the engines.

        groups: one per engine; rank 0 may be in one of them. max_num_seqs: sequences that an engine decodes at once. check: a
        function that is called between two waits; an exception that it raises ends the work.
        """
        self._groups = groups
        self.check = check
        self.judge: Judge | None = None  # of the tasks that one judges
        self.rewards: RewardEngines | None = None  # engines of the reward model that is evaluated
        self._most = AHEAD * max_num_seqs

    def generate(
        self, prompts: Sequence[Prompt], spec: RolloutSpec, seed: int, max_turns: int = 1, skip: KeptSamples | None = None
    ) -> Iterator[RolloutGroup]:
        """Sample the prompts, and yield each group when all its episodes have ended.

        An answer depends only on the seed, `spec.purpose`, `Prompt.index` and the sample's number, not on the engine. skip:
        samples that are not drawn again; their rollouts in the groups are empty.
        """
        dispatch = Dispatcher(self._groups, seed, max_turns, None)
        finished = {index: dict.fromkeys(samples, Rollout((), 0.0)) for index, samples in (skip or {}).items()}
        waiting = list(reversed(prompts))
        while waiting or any(dispatch.outstanding):
            self.check()
            outstanding = dispatch.outstanding
            room = sum(max(0, -(-(self._most - episodes) // spec.samples)) for episodes in outstanding)
            batch = [waiting.pop() for _ in range(min(len(waiting), max(room, int(not any(outstanding)))))]
            if batch:
                dispatch.send(batch, spec, finished)
            dispatch.receive()
            yield from dispatch.take(spec.purpose)

    def likelihoods(self, units: Sequence[Sequence[LikelihoodRequest]]) -> Iterator[tuple[int, list[Likelihood]]]:
        """Yield (index of a unit, its likelihoods in the order of its requests) as the units end.

        An engine computes each unit alone, so the values do not depend on other units, on the engine or on the number of
        engines.
        """
        waiting = list(reversed(range(len(units))))
        computing: list[dict[int, Future[list[Likelihood]]]] = [{} for _ in self._groups]  # by engine, then unit
        while waiting or any(computing):
            self.check()
            for group, futures in zip(self._groups, computing, strict=True):
                while waiting and len(futures) < UNITS_AHEAD and not group.includes_caller:
                    unit = waiting.pop()
                    futures[unit] = group.call(GenerateRole.likelihoods, list(units[unit]))
            here = next((i for i, group in enumerate(self._groups) if group.includes_caller), None)
            if here is not None and waiting and not computing[here]:  # computes it in this call, so the others come first
                unit = waiting.pop()
                computing[here][unit] = self._groups[here].call(GenerateRole.likelihoods, list(units[unit]))
            block = not any(future.done for futures in computing for future in futures.values())
            while self._groups[0].receive_replies(block=block):
                block = False
            for futures in computing:
                for unit, future in [item for item in futures.items() if item[1].done]:
                    del futures[unit]
                    yield unit, future.result()[0]
