"""Take one training step of one backend on one rank, packed or padded, on random tokens, without sampling.

`python -m tests.benchmarks.train_step CASE FOLDER BACKEND LAYOUT`, with BACKEND fsdp or megatron and LAYOUT packed or padded.

Padded is what a trainer without packing computes: every sample of a microbatch made as long as its longest by tokens that the
loss does not count (`cases.padded_microbatches`). The loss is SFT's, since its value tells whether the log-probs of two
contenders agree.

On one rank in float32 the FSDP2 backend runs the plain Hugging Face module, with no sharding machinery around it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pipeline import train
from pipeline.algorithms.loss import sft_loss
from pipeline.config import (
    DTensorConfig,
    MegatronConfig,
    MegatronDDPConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from pipeline.data.packing import pack, plan_microbatches
from pipeline.train.train_backend import ModelRole
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, Sample
from tests.benchmarks.cases import CASES, LEARNING_RATE, PAD, Case, padded_microbatches
from tests.benchmarks.contender import Clock, Turns
from tests.benchmarks.our_step import join_alone

TRAIN_BACKENDS = {"fsdp": "FSDP2", "megatron": "Megatron-Core"}
FORWARD, BACKWARD, OPTIMIZER = "forward and loss", "backward", "norm, clip and update"


class TrainStep:
    def __init__(self, case: Case, folder: Path, backend: str, layout: str, compiled: bool = False):
        self.clock, self._steps = Clock(), 0
        self._case, self._padded = case, layout == "padded"
        policy = _policy(case, folder, backend == "megatron", compiled)
        self.backend = train.build(policy, dist.group.WORLD, 0, ModelRole())

    def step(self) -> dict[str, float]:
        """Return the step's loss and gradient norm. The times are in `clock`."""
        samples = samples_of(self._case, self._steps)
        counts = GlobalCounts(sum(int(sample.loss_mask.sum()) for sample in samples), len(samples))
        batches = [pack(microbatch, self.backend.device) for microbatch in microbatches(self._case, samples, self._padded)]

        def loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
            # Only the engine knows when a backward pass has ended, whichever code began it.
            outputs.logprobs.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(backward_ends))
            output = sft_loss(outputs, batch, counts)
            self.clock.lap(FORWARD)
            return output

        def backward_ends() -> None:
            self.clock.lap(BACKWARD)

        self.clock.start()
        result = self.backend.step(batches, loss)
        self.clock.lap(OPTIMIZER)
        self._steps += 1
        return {name: result.metrics[name] for name in ("loss", "grad_norm")}


def samples_of(case: Case, step: int) -> list[Sample]:
    """Return samples of the case's prompts and lengths, with random tokens for completions, in a rollout's order."""
    prompts = case.prompts_of(step).astype(np.int32).repeat(case.generations, axis=0)
    random = np.random.default_rng((step, 1))
    return [
        _sample(np.concatenate([prompt, random.integers(2, case.vocab_size, length, np.int32)]), case.prompt_length)
        for prompt, length in zip(prompts, case.lengths(), strict=True)
    ]


def microbatches(case: Case, samples: list[Sample], padded: bool) -> list[list[Sample]]:
    lengths = [len(sample.tokens) for sample in samples]
    if padded:
        plan = padded_microbatches(lengths, case.packed_tokens)
        return [[_padded(samples[i], max(lengths[j] for j in members)) for i in members] for members in plan]
    (plan,) = plan_microbatches(lengths, 1, case.packed_tokens, None)
    return [[samples[i] for i in members] for members in plan]


def _sample(tokens: np.ndarray, prompt_length: int) -> Sample:
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(tokens, np.arange(len(tokens)) >= prompt_length, nothing, nothing)


def _padded(sample: Sample, length: int) -> Sample:
    def longer(values: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(values, (0, length - len(values)), constant_values=fill)

    return Sample(longer(sample.tokens, PAD), *(longer(x, 0) for x in (sample.loss_mask, sample.logprobs, sample.advantages)))


def _policy(case: Case, folder: Path, megatron: bool, compiled: bool) -> PolicyConfig:
    return PolicyConfig(
        model_name=str(folder),
        random_init=True,  # the same weights for all contenders, from the seed
        max_total_sequence_length=case.prompt_length + case.max_length,
        precision="float32",
        sequence_packing=SequencePackingConfig(train_mb_tokens=case.packed_tokens),  # what compiled layers are tried out with
        dtensor_cfg=DTensorConfig(compile=compiled),
        megatron_cfg=MegatronConfig(enabled=megatron, distributed_data_parallel_config=MegatronDDPConfig()),
        optimizer=OptimizerConfig(kwargs={"lr": LEARNING_RATE, "weight_decay": 0.0}),
    )


def main(name: str, folder: str, backend: str, layout: str) -> None:
    turns = Turns()
    join_alone()
    ours = TrainStep(CASES[name], Path(folder), backend, layout)
    turns.reply({})
    while turns.wait():
        metrics = ours.step()
        turns.reply({"times": ours.clock.take(), "metrics": metrics})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
