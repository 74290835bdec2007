"""Measure what busy environments take from the engine beside them, in threads of its process and in judges.

    python -m tests.benchmarks.environments [vllm|transformers]

One engine with a tiny model draws episodes of two turns, 32 at a time. Their environment evaluates arithmetic with the
calculator's own code for a given time a turn, as tools and judges in plain Python do. Both places take turns, round by round,
so other load on the machine affects both. Prints medians over rounds: milliseconds of an engine's step, on the clock
and of the CPU of the engine's process, and turns a second. A tiny model's step is all overhead, which is what a step of a GPU
leaves to the CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from pipeline import generate
from pipeline.config import EnvironmentConfig, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.environments.calculator import evaluate
from pipeline.environments.environment import Environment, Outcome
from pipeline.rollout.driver import EpisodeDriver
from pipeline.rollout.judges.environment_steps import EnvironmentSettings
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.lockstep import Lockstep
from tests.generate import tiny
from tests.rollout.engine import NoWorld, ThreadJudges, prompts, work

ROUNDS, PROMPTS, SAMPLES = 7, 32, 4
BUSY_MS = (0.0, 0.5, 2.0, 8.0)  # of a turn
PLACES = ("threads", "judges")


class Busy(Environment):
    """Computes for a while, answers the first turn and ends with the second."""

    workers = 16

    def __init__(self, busy_ms: float) -> None:
        self._busy_s = busy_ms / 1e3

    def reset(self, prompt):
        return []

    def step(self, turns, text):
        turns.append(text)
        end = time.thread_time() + self._busy_s
        while time.thread_time() < end:
            evaluate("47*85+3*(12-5)")
        return Outcome(1.0, {}, {"role": "user", "content": "w21 w22"} if len(turns) == 1 else None)


class Contender:
    """A driver on the engine, and its rounds' measurements."""

    def __init__(self, engine, folder: Path, place: str, busy_ms: float) -> None:
        kind = "tests.benchmarks.environments.Busy"
        environment = EnvironmentConfig(kind=kind, kwargs={"busy_ms": busy_ms}, timeout_s=60.0, precision="float32")
        settings = EnvironmentSettings({"busy": environment}, TokenizerConfig(name=str(folder)), False, 2, sys.path)
        self.engine, wakeup = engine, threading.Event()
        if place == "threads":
            tokenizer = load_tokenizer(settings.tokenizer)
            observations = Observations(tokenizer, settings.tokenizer, chat=False)
            self.environments = ThreadJudges({"busy": Busy(busy_ms)}, tokenizer, observations, wakeup)
        else:
            self.environments = JudgePool(settings, wakeup)
            self.environments.wait_until_loaded()
        self.driver = EpisodeDriver(engine, self.environments, Lockstep(None), NoWorld(), wakeup, 32, tiny.MAX_MODEL_LEN)
        self.wall_ms, self.cpu_ms, self.turns_s = [], [], []

    def round(self, number: int) -> None:
        steps, wall, cpu = self.engine.steps, time.perf_counter(), time.process_time()
        later = self.driver.rollout(work(number, prompts(PROMPTS, "busy"), SAMPLES, max_new_tokens=12, max_turns=2))
        self.driver.work(lambda: False)
        steps, wall, cpu = self.engine.steps - steps, time.perf_counter() - wall, time.process_time() - cpu
        rollouts = [rollout for part in later.unsent for rollout in part.group.rollouts]
        assert not any(rollout.failure for rollout in rollouts)
        self.wall_ms.append(1e3 * wall / steps)
        self.cpu_ms.append(1e3 * cpu / steps)
        self.turns_s.append(sum(len(rollout.turns) for rollout in rollouts) / wall)


class Counted:
    """An engine that counts its steps."""

    def __init__(self, engine) -> None:
        self._engine, self.steps = engine, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self):
        self.steps += 1
        return self._engine.step()


def main(backend: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny.save(Path(folder), "llama", seed=0)
        policy = tiny.policy(Path(folder), backend, vllm_kwargs={"kv_cache_memory_bytes": 1 << 26})
        engine = Counted(generate.build(policy, engine_ranks=1, rank_in_engine=0, seed=0))
        tiny.load(engine, checkpoint.weights().items(), version=1)
        print(f"{backend}: medians of {ROUNDS} rounds; ms on the clock, CPU ms of the engine's process, turns a second")
        print(f"{'busy':>8} {'threads':>24} {'judges':>24} {'threads / judges':>24}")
        for busy_ms in BUSY_MS:
            contenders = [Contender(engine, Path(folder), place, busy_ms) for place in PLACES]
            for number in range(ROUNDS + 1):
                for contender in contenders:
                    contender.round(number)
            rows = [[statistics.median(taken[1:]) for taken in (one.wall_ms, one.cpu_ms, one.turns_s)] for one in contenders]
            told = [f"{row[0]:8.2f} {row[1]:7.2f} {row[2]:7.0f}" for row in rows]
            ratio = " ".join(f"{a / b:7.2f}" for a, b in zip(*rows, strict=True))
            print(f"{busy_ms:5.1f} ms {told[0]:>24} {told[1]:>24} {ratio:>24}", flush=True)
            for contender in contenders:
                contender.environments.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "vllm")
