"""Ask the engines of an evaluation, on rank 0: those of the policy, and those of a judge and a reward model beside it.

Each engine holds as many episodes as it can decode at the same time, and as many again that wait. An engine that finishes
episodes gets new ones, so faster engines answer more questions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.config import PolicyConfig, Recipe, engine_models, engine_ranks, evaluated_reward_model, judge_policy
from pipeline.coordination.dispatch import Dispatcher, RolloutSpec
from pipeline.data.chat import load_tokenizer
from pipeline.data.packing import plan_microbatches
from pipeline.evaluation.judge import Judge
from pipeline.evaluation.judge_endpoint import EndpointJudge
from pipeline.evaluation.judge_engines import EngineJudge
from pipeline.roles import GenerateRole
from pipeline.rollout.rollout_messages import ScoreWork
from pipeline.rpc import Future, RpcGroup
from pipeline.types import Likelihood, LikelihoodRequest, Prompt, Rollout, RolloutGroup

KeptSamples = Mapping[int, Collection[int]]
"""Prompt index -> numbers of the samples whose answers are kept."""

Plan = list[list[list[int]]]
"""plan[rank of the engine][microbatch]: indices of sequences in a unit of sequences to score."""
Begin = Callable[[RpcGroup[GenerateRole], int], Future[Any]]
"""A function (engine, index of a unit) that begins to compute a unit on an engine."""

AHEAD = 2
"""Episodes that an engine holds, as a multiple of `max_num_seqs`."""
UNITS_AHEAD = 2
"""Number of units of requests that an engine holds if rank 0 is not part of it."""


def compute(
    groups: Sequence[RpcGroup[GenerateRole]], units: int, begin: Begin, check: Callable[[], None]
) -> Iterator[tuple[int, list[Any]]]:
    """Yield (index of a unit, the replies of its engine's ranks) as the units end. One engine computes a whole unit.

    check: a function that is called between two waits; its exceptions end the work.
    """
    waiting = list(reversed(range(units)))
    computing: list[dict[int, Future[Any]]] = [{} for _ in groups]  # by engine, then unit
    while waiting or any(computing):
        check()
        for group, futures in zip(groups, computing, strict=True):
            while waiting and len(futures) < UNITS_AHEAD and not group.includes_caller:
                unit = waiting.pop()
                futures[unit] = begin(group, unit)
        here = next((i for i, group in enumerate(groups) if group.includes_caller), None)
        if here is not None and waiting and not computing[here]:  # computes it in this call, so the others come first
            unit = waiting.pop()
            computing[here][unit] = begin(groups[here], unit)
        block = not any(future.done for futures in computing for future in futures.values())
        while groups[0].receive_replies(block=block):
            block = False
        for futures in computing:
            for unit, future in [item for item in futures.items() if item[1].done]:
                del futures[unit]
                yield unit, future.result()


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

        def begin(group: RpcGroup[GenerateRole], unit: int) -> Future[list[Likelihood]]:
            return group.call(GenerateRole.likelihoods, list(units[unit]))

        for unit, replies in compute(self._groups, len(units), begin, self.check):
            yield unit, replies[0]


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
        plans = [plan_microbatches([len(tokens) for tokens in unit], self._ranks, *self._bounds) for unit in units]

        def begin(group: RpcGroup[GenerateRole], unit: int) -> Future[list[float]]:
            works = [ScoreWork([[units[unit][i] for i in part] for part in microbatches]) for microbatches in plans[unit]]
            return group.scatter(GenerateRole.score, works)

        for unit, replies in compute(self._groups, len(units), begin, self._check):
            yield unit, _in_order(plans[unit], replies, len(units[unit]))


def _in_order(plan: Plan, replies: Sequence[Sequence[float]], count: int) -> list[float]:
    scores = [float("nan")] * count
    for microbatches, reply in zip(plan, replies, strict=True):
        for i, score in zip(itertools.chain(*microbatches), reply, strict=True):
            scores[i] = score
    return scores


def engines_of(
    recipe: Recipe, groups: Sequence[RpcGroup[GenerateRole]], max_num_seqs: Sequence[int], check: Callable[[], None]
) -> Engines:
    """Return the engines of the evaluated model, with the judge and the reward model beside them.

    groups: one per engine, of all models. max_num_seqs: for each engine, the number of sequences that it decodes at once.
    """
    served = list(zip(engine_models(recipe, len(groups)), groups, strict=True))
    of = {model: [group for name, group in served if name == model] for model, _ in served}
    most = max((number for (model, _), number in zip(served, max_num_seqs, strict=True) if model == "policy"), default=0)
    policy = Engines(of.get("policy", []), most, check)
    policy.judge = _judge(recipe, of.get("judge", []), check)
    if rewards := of.get("reward_model"):
        ranks = engine_ranks(recipe.policy.generation.vllm_cfg)
        policy.rewards = RewardEngines(rewards, ranks, evaluated_reward_model(recipe), check)
    return policy


def _judge(recipe: Recipe, groups: Sequence[RpcGroup[GenerateRole]], check: Callable[[], None]) -> Judge | None:
    section = recipe.evaluate.judge
    if section.env_name is not None:
        return EndpointJudge(f"env.{section.env_name}", recipe.env[section.env_name])
    if not groups:
        return None
    policy = judge_policy(recipe)
    return EngineJudge(groups, section, policy, load_tokenizer(policy.tokenizer), recipe.evaluate.seed, check)
