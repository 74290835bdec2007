"""Run our GRPO step in one process, from the pipeline's own parts for train and generate ranks, without messaging.

`python -m tests.benchmarks.our_step CASE FOLDER BACKEND PACKED_TOKENS`
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path

import numpy as np
import torch.distributed as dist

from pipeline import generate
from pipeline.config import (
    GenerationConfig,
    GRPOConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
    VLLMConfig,
)
from pipeline.data.batches import split_batch
from pipeline.data.chat import load_tokenizer
from pipeline.data.packing import pack
from pipeline.environments.environment import Environment, Outcome
from pipeline.generate.generate_backend import GenerateBackend
from pipeline.rollout.driver import EpisodeDriver
from pipeline.rollout.lockstep import Lockstep
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole
from pipeline.types import Completion, DataParallelRank, Prompt, Request, RolloutGroup, Sampling
from tests.algorithms.made import made
from tests.benchmarks.cases import CASES, LEARNING_RATE, Case, score
from tests.benchmarks.contender import Clock, Turns
from tests.rollout.engine import ThreadJudges


class EvenWords(Environment):
    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(score(text))


class Dealt:
    """A generation backend whose requests end after the case's completion lengths."""

    def __init__(self, engine: GenerateBackend):
        self._engine = engine
        self.lengths: list[int] = []  # of the next step's requests

    def add(self, requests: list[Request]) -> None:
        self._engine.add(
            [
                dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_new_tokens=length))
                for request, length in zip(requests, self.lengths, strict=True)
            ]
        )

    def step(self) -> list[Completion]:
        return self._engine.step()

    @property
    def pending(self) -> int:
        return self._engine.pending


class OurStep:
    def __init__(self, case: Case, folder: Path, backend: str, packed_tokens: int):
        self.case, self.clock, self._steps = case, Clock(), 0
        policy = self._policy = _policy(case, folder, backend, packed_tokens)
        self._grpo = made(GRPOConfig(use_leave_one_out_baseline=False), LossConfig(), updates=1)
        self._train = FSDPBackend(policy, dist.group.WORLD, 0, ModelRole())
        self._engine = generate.build(policy, engine_ranks=1, rank_in_engine=0, seed=0)
        self._dealt = Dealt(self._engine)
        self._driver = _driver(self._dealt, policy, self.clock)
        self._refit()

    def step(self) -> list[int]:
        """Return completion lengths. The times are in `clock`."""
        groups = self.rollout()
        self.learn(groups)
        return [rollout.drawn_tokens for group in groups for rollout in group.rollouts]

    def rollout(self) -> list[RolloutGroup]:
        prompts = self.case.prompts_of(self._steps)
        first = self._steps * len(prompts)
        work = RolloutWork(
            self._steps,
            [Prompt(first + i, tokens.astype(np.int32), "even", {}) for i, tokens in enumerate(prompts)],
            self.case.generations,
            "train",
            seed=0,
            sampling=Sampling(max_new_tokens=self.case.max_length),
        )
        self._dealt.lengths = self.case.lengths().tolist()
        answered = self._driver.rollout(work)
        self._driver.work(lambda: False)
        return [finished.group for finished in sorted(answered.unsent, key=lambda finished: finished.group_index)]

    def learn(self, groups: list[RolloutGroup]) -> None:
        with self.clock.phase("advantages and pack"):
            samples = self._grpo.compute_advantages(groups)
            ((update,),) = split_batch(samples, self._policy, [DataParallelRank(0, 1)], len(samples))
            batches = [pack([update.samples[i] for i in members], self._train.device) for members in update.train]
        with self.clock.phase("loss, backward and optimizer"):
            self._train.step(batches, lambda outputs, batch: self._grpo.loss(outputs, batch, update.counts))
        self._steps += 1
        with self.clock.phase("refit"):
            self._refit()

    def _refit(self) -> None:
        update = self._engine.update()
        update.load(self._train.weights())
        update.commit(self._steps)


def _driver(engine: Dealt, policy: PolicyConfig, clock: Clock) -> EpisodeDriver:
    """The driver needs a world only to record its phases, which a clock does here."""
    environments, wakeup, generation = {"even": EvenWords()}, threading.Event(), policy.generation
    threads = ThreadJudges(environments, load_tokenizer(policy.tokenizer), None, wakeup)
    most, longest = generation.max_num_seqs, generation.vllm_cfg.max_model_len
    return EpisodeDriver(engine, threads, Lockstep(None), clock, wakeup, most, longest)


def _policy(case: Case, folder: Path, backend: str, packed_tokens: int) -> PolicyConfig:
    longest = case.prompt_length + case.max_length
    return PolicyConfig(
        model_name=str(folder),
        tokenizer=TokenizerConfig(name=str(folder / "tokenizer")),
        train_global_batch_size=case.samples,
        train_micro_batch_size=1,
        logprob_batch_size=1,
        max_total_sequence_length=longest,
        precision="float32",
        sequence_packing=SequencePackingConfig(train_mb_tokens=packed_tokens, logprob_mb_tokens=packed_tokens),
        optimizer=OptimizerConfig(kwargs={"lr": LEARNING_RATE, "weight_decay": 0.0}),
        generation=GenerationConfig(
            backend=backend,
            max_new_tokens=case.max_length,
            max_num_seqs=case.samples,
            vllm_cfg=VLLMConfig(max_model_len=longest, enforce_eager=True),
        ),
    )


def join_alone() -> None:
    """Make this process a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main(name: str, folder: str, backend: str, packed_tokens: str) -> None:
    turns = Turns()
    join_alone()
    ours = OurStep(CASES[name], Path(folder), backend, int(packed_tokens))
    turns.reply({})
    while turns.wait():
        lengths = ours.step()
        turns.reply({"times": ours.clock.take(), "lengths": lengths})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
