"""Compare FSDP2's context and expert parallelism with data parallelism on two ranks: CPU seconds of a step at equal work.

`python -m tests.benchmarks layouts`. All layouts of a model take one step in turns, in the same two processes of one thread
each, from the same weights on the same samples: 32M parameters, sequences of 2,048 tokens on average. A rank computes as many
tokens in a microbatch at every layout. Seconds are those of both processes together, of all their threads.
"""

from __future__ import annotations

import datetime
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from pipeline.algorithms.loss import sft_loss
from pipeline.config import DTensorConfig, OptimizerConfig, PolicyConfig
from pipeline.data.packing import pack, plan_microbatches
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole
from pipeline.types import GlobalCounts, Sample
from tests.benchmarks.contender import ENVIRONMENT

RANKS = 2
LENGTHS = (3072, 2560, 1536, 1024)  # two data-parallel ranks get equally many tokens
WARMUP, STEPS = 1, 3
AGREEMENT = 1e-4  # of losses and gradient norms, relative
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": max(LENGTHS),
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LAYOUTS = {
    "dense": {"dp2": {}, "cp2": {"context_parallel_size": 2}},
    "mixture": {"dp2": {}, "ep2": {"expert_parallel_size": 2}},
}


def models() -> dict[str, PreTrainedConfig]:
    """Return a dense model and a mixture of experts, each of 32M parameters."""
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 200, "norm_topk_prob": True}
    return {
        "dense": LlamaConfig(**SHAPE, intermediate_size=1600),
        "mixture": Qwen3MoeConfig(**SHAPE, intermediate_size=1600, **mixture),
    }


@dataclass
class Contender:
    """A layout of a model, its seconds (CPU of both ranks, wall) of each step, and its last metrics."""

    backend: FSDPBackend
    times: list[tuple[float, float]] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def step(self, samples: list[Sample]) -> None:
        plan = plan_microbatches([len(sample.tokens) for sample in samples], self.backend.data_size, self._most_tokens, None)
        batches = [pack([samples[i] for i in members], "cpu") for members in plan[self.backend.data_rank]]
        counts = GlobalCounts(sum(int(sample.loss_mask.sum()) for sample in samples), len(samples))
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        self.metrics = self.backend.step(batches, lambda outputs, batch: sft_loss(outputs, batch, counts)).metrics
        spent = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall], dtype=torch.float64)
        dist.all_reduce(spent)
        self.times.append((spent[0].item(), spent[1].item() / RANKS))

    @property
    def _most_tokens(self) -> int:
        return sum(LENGTHS) // self.backend.data_size


def samples_of(step: int) -> list[Sample]:
    random = np.random.default_rng(step)
    return [_sample(random.integers(2, SHAPE["vocab_size"], length, np.int32)) for length in LENGTHS]


def _sample(tokens: np.ndarray) -> Sample:
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(tokens, np.arange(len(tokens)) > 0, nothing, nothing)


def _policy(model: Path, layout: dict[str, int]) -> PolicyConfig:
    return PolicyConfig(
        model_name=str(model),
        random_init=True,
        max_total_sequence_length=max(LENGTHS),
        precision="float32",
        dtensor_cfg=DTensorConfig(**layout),
        optimizer=OptimizerConfig(kwargs={"lr": 1e-4, "weight_decay": 0.0}),
    )


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=900)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timeout)
    for model, layouts in LAYOUTS.items():
        contenders = {
            name: Contender(FSDPBackend(_policy(folder / model, layout), dist.group.WORLD, 0, ModelRole()))
            for name, layout in layouts.items()
        }
        for step in range(WARMUP + STEPS):
            for contender in contenders.values():
                contender.step(samples_of(step))
            _check_agreement(contenders)
        if rank == 0:
            _print(model, contenders)
    dist.destroy_process_group()


def _check_agreement(contenders: dict[str, Contender]) -> None:
    expected = contenders["dp2"].metrics
    for name, contender in contenders.items():
        for key in ("loss", "grad_norm"):
            if not math.isclose(contender.metrics[key], expected[key], rel_tol=AGREEMENT):
                raise RuntimeError(f"{name} has a {key} of {contender.metrics[key]}, but dp2 of {expected[key]}")


def _print(model: str, contenders: dict[str, Contender]) -> None:
    count = sum(parameter.numel() for parameter in contenders["dp2"].backend._parameters.values())
    print(
        f"\n{model}: {count / 1e6:.1f}M parameters, float32, {len(LENGTHS)} sequences of {sum(LENGTHS) // len(LENGTHS):,}"
        f" tokens on average. Two ranks of one thread. {STEPS} steps, in turns, after {WARMUP} for warming up.\n"
        f"{'seconds a step':16s}{'CPU min':>9s}{'median':>9s}{'wall min':>9s}{'median':>9s}{'CPU / dp2':>11s}"
    )
    fastest = min(cpu for cpu, _ in contenders["dp2"].times[WARMUP:])
    for name, contender in contenders.items():
        cpu, wall = (sorted(times) for times in zip(*contender.times[WARMUP:], strict=True))
        middle = len(cpu) // 2
        row = "".join(f"{seconds:9.2f}" for seconds in (cpu[0], cpu[middle], wall[0], wall[middle]))
        print(f"{name:16s}{row}{cpu[0] / fastest:11.2f}", flush=True)


def main() -> None:
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, config in models().items():
            config.save_pretrained(folder / model)
        mp.start_processes(_rank, (folder,), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
