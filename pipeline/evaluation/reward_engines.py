"""Ask the engines that serve a reward model, on rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pipeline.config import PolicyConfig
from pipeline.data.packing import plan_microbatches
from pipeline.roles import GenerateRole
from pipeline.rollout.rollout_messages import ScoreWork
from pipeline.rpc import Future, RpcGroup

Plan = list[list[list[int]]]
"""plan[rank of the engine][microbatch]: indices of sequences in the unit."""
AHEAD = 2
"""Number of units that an engine holds if rank 0 is not part of it."""


class RewardEngines:
    """The engines that serve a reward model, each of `ranks` data-parallel ranks."""

    def __init__(
        self,
        groups: Sequence[RpcGroup[GenerateRole]],
        ranks: int,
        model: PolicyConfig,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind to the engines. check: a function that is called between two waits; its exceptions end the work."""
        self._groups, self._ranks, self._check = groups, ranks, check
        packing = model.sequence_packing
        self._bounds = (packing.logprob_mb_tokens, None) if packing.enabled else (None, model.logprob_batch_size)

    def score(self, units: Sequence[Sequence[np.ndarray]]) -> Iterator[tuple[int, list[float]]]:
        """Yield (index of a unit, the scores of its sequences) as units are computed. One engine computes a whole unit.

        units: of sequences of tokens, [L] int32 each.
        """
        waiting = list(reversed(range(len(units))))
        computing: list[dict[int, tuple[Plan, Future[list[float]]]]] = [{} for _ in self._groups]
        while waiting or any(computing):
            self._check()
            for engine, group in enumerate(self._groups):
                while waiting and len(computing[engine]) < AHEAD and not group.includes_caller:
                    unit = waiting.pop()
                    computing[engine][unit] = self._begin(group, units[unit])
            here = next((engine for engine, group in enumerate(self._groups) if group.includes_caller), None)
            if here is not None and waiting and not computing[here]:  # rank 0 computes it in this call, so others come first
                unit = waiting.pop()
                computing[here][unit] = self._begin(self._groups[here], units[unit])
            block = not any(future.done for open_ in computing for _, future in open_.values())
            while self._groups[0].receive_replies(block=block):
                block = False
            for open_ in computing:
                for unit, (plan, future) in [item for item in open_.items() if item[1][1].done]:
                    del open_[unit]
                    yield unit, _in_order(plan, future.result(), len(units[unit]))

    def _begin(self, group: RpcGroup[GenerateRole], sequences: Sequence[np.ndarray]) -> tuple[Plan, Future[list[float]]]:
        plan = plan_microbatches([len(tokens) for tokens in sequences], self._ranks, *self._bounds)
        works = [ScoreWork([[sequences[i] for i in members] for members in microbatches]) for microbatches in plan]
        return plan, group.scatter(GenerateRole.score, works)


def _in_order(plan: Plan, replies: Sequence[Sequence[float]], count: int) -> list[float]:
    scores = [float("nan")] * count
    for microbatches, reply in zip(plan, replies, strict=True):
        for i, score in zip(itertools.chain(*microbatches), reply, strict=True):
            scores[i] = score
    return scores
