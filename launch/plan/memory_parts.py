"""What a rank's memory is divided into, and the answers of the memory part of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launch.model_shape import ModelShape

Parts = dict[str, float]  # bytes, by one of PARTS
PARTS = (
    "weights",  # of the policy, with float32 main weights
    "merged weights",  # W + BA, of a policy with adapters: what a refit reads
    "gradients",  # as they lie between microbatches
    "optimizer",  # Adam's two moments
    "activations",  # what layers keep for their backward pass, and what one of them works in
    "logits",  # of a chunk, with what the softmax and its gradient work in
    "buffers",  # gathered weights, gradients under way, staging of the refit, the step's packed batches
    "other models",  # critic, teacher, reward model, the reference policy (Megatron-Core: on a CPU rank)
    "KV cache",
    "runtime",  # of a GPU: CUDA context, libraries' workspaces, NCCL; CUDA graphs
)
RUNTIME = 2.0 * 2**30  # bytes of a GPU that no tensor has: an assumption, not a measurement


@dataclass(frozen=True)
class TrainMemory:
    """Of the fullest train rank in its fullest phase."""

    parts: Parts
    phase: str  # when that is
    phases: Mapping[str, float]  # bytes, of each phase that was looked at
    host: float  # bytes of host memory per rank: reference weights, what is offloaded
    assumptions: tuple[str, ...]
    shapes: Mapping[str, ModelShape]  # what it was told from

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class GenerateMemory:
    """The memory of the fullest generate rank."""

    parts: Parts
    received: float  # bytes of weights that a refit brings, which are not quantized yet
    exact: bool  # whether the weights take what is counted; else they may take less
    tokens: float  # that the KV cache of an engine holds; 0 or less: the weights leave no room
    sequences: float  # of max_model_len that fit at once; policy.generation.max_num_seqs is what may run
    assumptions: tuple[str, ...]
    shape: ModelShape  # what it was told from

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def add(*parts: Mapping[str, float]) -> Parts:
    """Summed by name, in the order of PARTS, without what is 0."""
    sums = {name: sum(part.get(name, 0.0) for part in parts) for name in PARTS}
    if unknown := {name for part in parts for name in part} - sums.keys():
        raise AssertionError(f"not parts of memory: {unknown}")
    return {name: size for name, size in sums.items() if size}
