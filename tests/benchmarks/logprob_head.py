"""Measure what the chunked log-prob head saves in a training step: `python -m tests.benchmarks.logprob_head [CASE ...]`.

Two processes take one step on one microbatch of random tokens, in turns, on one thread each, in float32, with FSDP2's plain
module and recomputed layers. Both have the same random weights, SmolLM2's vocabulary, and its shape (135M) or a smaller one:

    chunked   `pipeline/train/logprobs.py`: logits of --chunk tokens at a time, computed again in the backward pass
    whole     torch's cross entropy of float32 logits of all tokens [T, V], as trainers without a fused head have it

Printed: the medians of the step's CPU seconds and of the memory that it adds: the peak of the process's resident set, in the
forward and backward passes and in the whole step with AdamW's temporaries, less its size before (weights, and moments, which a
short step allocated); then by how much log-probs differ at most, and gradients relative to the largest. Megatron-Core and
tensor-parallel ranks compute the same function, each its rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig

from pipeline import train
from pipeline.algorithms.loss import sft_loss
from pipeline.config import DTensorConfig, OptimizerConfig, PolicyConfig
from pipeline.data.packing import pack
from pipeline.train import heads
from pipeline.train.logprobs import TargetOutputs
from pipeline.train.train_backend import ModelRole
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, Sample
from tests.benchmarks.contender import ENVIRONMENT
from tests.benchmarks.our_step import join_alone

VOCABULARY = 49152
BOUND = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int


CASES = {"tiny": Shape(32, 64, 1, 2, 1), "32M": Shape(384, 1024, 8, 6, 2), "135M": Shape(576, 1536, 30, 9, 3)}
HEADS = ("chunked", "whole")


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, *_: object) -> TargetOutputs:
    """Return the targets' log-probs by way of all logits."""
    return TargetOutputs(-cross_entropy((hidden @ weight.T).float() / temperature, targets, reduction="none"), None, None, None)


class Memory:
    """The peak of this process's resident set since the last `reset`, which Linux can do."""

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def added(self) -> int:
        """Return the bytes of the peak above the size at `reset`."""
        return self._status("VmHWM") - self._before

    def _status(self, name: str) -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
        return 1024 * int(line.split()[1])


# ---- one contender ------------------------------------------------------------------------------------------------------


def take_step(case: str, head: str, tokens: int, chunk: int, folder: Path) -> dict[str, float]:
    """Take a step; save log-probs and gradients in `folder`, which has the model's config. Return seconds and bytes."""
    if head == "whole":
        heads.target_outputs = whole  # type: ignore[assignment]
    join_alone()
    policy = PolicyConfig(
        model_name=str(folder),
        random_init=True,
        max_total_sequence_length=tokens,
        precision="float32",
        logprob_chunk_size=chunk,
        max_grad_norm=None,
        dtensor_cfg=DTensorConfig(activation_checkpointing=True),
        optimizer=OptimizerConfig(kwargs={"lr": 0.0}),
    )
    backend: Any = train.build(policy, dist.group.WORLD, 0, ModelRole())
    memory, logprobs, found = Memory(), torch.empty(0), dict[str, float]()

    def step(batch: PackedBatch) -> None:
        def loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
            nonlocal logprobs
            assert outputs.logprobs is not None
            logprobs = outputs.logprobs.detach()
            # Only the engine knows when a backward pass has ended.
            outputs.logprobs.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(backward_ends))
            return sft_loss(outputs, batch, GlobalCounts(int(batch.loss_mask.sum()), 1))

        backend.step([batch], loss)

    def backward_ends() -> None:
        found["passes"] = memory.added()

    memory.reset()
    step(batch_of(64))
    memory.reset()
    begin = time.process_time()
    step(batch_of(tokens))
    found |= {"seconds": time.process_time() - begin, "step": memory.added()}
    gradients = {name: parameter.grad for name, parameter in backend._model.hf.named_parameters()}
    torch.save({"log-probs": logprobs, **gradients}, folder / f"{head}.pt")
    dist.destroy_process_group()
    return found


def batch_of(tokens: int) -> PackedBatch:
    drawn, nothing = np.random.default_rng(0).integers(0, VOCABULARY, tokens, np.int32), np.zeros(tokens, np.float32)
    return pack([Sample(drawn, np.arange(tokens) > 0, nothing, nothing)], torch.device("cpu"))


# ---- the comparison -----------------------------------------------------------------------------------------------------


def compare(case: str, tokens: int, chunk: int, times: int) -> None:
    """Print a case's table. Raises AssertionError if the two heads disagree."""
    shape, found = CASES[case], {head: [] for head in HEADS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config_of(shape).save_pretrained(folder)
        for head in HEADS * times:
            options = ["--tokens", str(tokens), "--chunk", str(chunk), "--head", head, "--folder", name]
            command = [sys.executable, "-m", "tests.benchmarks.logprob_head", case, *options]
            run = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr
            found[head].append(json.loads(run.stdout.splitlines()[-1]))
        ours, others = (torch.load(folder / f"{head}.pt") for head in HEADS)
    size = sum(tensor.numel() for name, tensor in ours.items() if name != "log-probs")
    print(f"\n{case}: {size / 1e6:.1f}M parameters, {tokens} tokens, chunks of {chunk}; medians of {times}, range in brackets")
    medians = {}
    for head in HEADS:
        taken = {what: [one[what] for one in found[head]] for what in ("seconds", "passes", "step")}
        medians[head] = [statistics.median(values) for values in taken.values()]
        ranges = [f"{medians[head][0]:7.2f} CPU s ({min(taken['seconds']):.2f} to {max(taken['seconds']):.2f})"]
        ranges += [
            f"{statistics.median(values) / 1e6:7,.0f} MB in the {what} ({min(values) / 1e6:,.0f} to {max(values) / 1e6:,.0f})"
            for what, values in taken.items()
            if what != "seconds"
        ]
        print(f"  {head:8s}", "  ".join(ranges))
    ratios = [f"{one / other:.2f}" for one, other in zip(*(medians[head] for head in HEADS), strict=True)]
    logits = f"float32 logits of all tokens take {4 * tokens * VOCABULARY / 1e6:,.0f} MB"
    print(f"  chunked / whole: CPU seconds {ratios[0]}, memory of the passes {ratios[1]}, of the step {ratios[2]}; {logits}")
    differences = {name: float((ours[name] - tensor).abs().max()) for name, tensor in others.items()}
    logprobs = differences.pop("log-probs")
    gradients = max(differences.values()) / max(float(others[name].abs().max()) for name in differences)
    print(f"  largest difference of log-probs {logprobs:.1e}, of gradients, relative to the largest, {gradients:.1e}")
    assert max(logprobs, gradients) < BOUND


def config_of(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.logprob_head")
    parser.add_argument("cases", nargs="*", metavar="CASE", default=["32M", "135M"], help=", ".join(CASES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--head", choices=HEADS, help=argparse.SUPPRESS)  # take one step of it
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    for case in given.cases:
        if given.head:
            print(json.dumps(take_step(case, given.head, given.tokens, given.chunk, given.folder)))
        else:
            compare(case, given.tokens, given.chunk, given.times)


if __name__ == "__main__":
    main()
