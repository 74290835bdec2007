"""The episode driver, on generate ranks: prompts in, groups of rewarded completions out.

An engine is stepped until every completion has ended; each is judged, in a thread, while others are still being sampled. All
ranks of an engine run this with the same arguments; only the first, the engine's leader, judges and replies.

Left out: several turns per episode, and running ahead of training.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from pipeline.environments.base import Environment
from pipeline.generate.base import GenerateBackend
from pipeline.rollout.work import RolloutWork
from pipeline.types import Completion, Prompt, Request, Rollout, RolloutGroup, Turn
from pipeline.world import World


def sampling_seed(seed: int, purpose: str, prompt: int, sample: int) -> int:
    """A completion's own seed, in [0, 2**63). Who samples it, and beside what, does not enter."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def rollout(
    work: RolloutWork,
    engine: GenerateBackend,
    environments: dict[str, Environment],
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    leader: bool,
) -> list[RolloutGroup]:
    """Groups in the order of `work.prompts`, rollouts in sample order. Empty on ranks that do not lead."""
    requests = {
        f"{i}/{sample}": Request(
            f"{i}/{sample}",
            prompt.tokens,
            sampling_seed(work.seed, work.purpose, prompt.index, sample),
            work.sampling,
        )
        for i, prompt in enumerate(work.prompts)
        for sample in range(work.samples)
    }
    judged: dict[str, Future[Rollout]] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="environment") as judge:
        with world.phase("decode"):
            engine.add(list(requests.values()))
            while engine.pending:
                for completion in engine.step():
                    if leader:
                        prompt = work.prompts[int(completion.id.split("/")[0])]
                        environment = environments[prompt.environment]
                        judged[completion.id] = judge.submit(_judge, environment, prompt, completion, tokenizer)
        with world.phase("reward"):
            rollouts = {request: future.result() for request, future in judged.items()}
    if not leader:
        return []
    return [
        RolloutGroup(prompt, tuple(rollouts[f"{i}/{sample}"] for sample in range(work.samples)))
        for i, prompt in enumerate(work.prompts)
    ]


def _judge(environment: Environment, prompt: Prompt, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    outcome = environment.step(environment.reset(prompt), text)
    return Rollout((Turn(completion),), outcome.reward, outcome.metrics)
