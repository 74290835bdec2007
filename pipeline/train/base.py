"""What the pipeline asks of a training backend.

Every method is SPMD: all ranks of the train component call it together, with the same arguments except for `batches`, which are
the rank's own. Ranks with the same `data_rank` (peers in tensor, pipeline or context parallelism) are given the same batches;
all data ranks are given the same number of batches. Weights go by their Hugging Face names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pipeline.boxes import Region
from pipeline.train.shards import Shards
from pipeline.types import Head, LossOutput, Outputs, PackedBatch, StepResult

Loss = Callable[[Outputs, PackedBatch], LossOutput]
"""(the model's outputs with a graph, the batch) -> the batch's share of the loss."""


Phase = Callable[[str], contextlib.AbstractContextManager[None]]
"""Says what is done within its block."""


@dataclass(frozen=True, slots=True)
class ModelRole:
    """What a model is for."""

    head: Head = "logprobs"
    trained: bool = True  # False: no gradients and no optimizer; weights in policy.precision
    reference: bool = False  # keep the initial weights for `forward(..., "reference")`
    entropy: bool = False  # outputs carry the entropy
    truncated: bool = False  # log-probs of the policy are of what policy.generation's top_p and top_k leave
    offload: bool = False  # of a model that is not trained: weights are in host memory but for the time of a forward pass
    phase: Phase = contextlib.nullcontext  # tells what takes long while the model is loaded


class TrainBackend(Protocol):
    data_rank: int  # this rank's place among the data-parallel ranks
    data_size: int  # how many of those there are
    device: torch.device

    def forward(self, batches: Sequence[PackedBatch], model: str = "policy", top_k: int = 0) -> list[Outputs]:
        """Outputs without a graph, one per batch. "reference": by the weights as they were loaded, never truncated: what they
        would cut away is not what was. top_k: also the most likely tokens of each distribution."""

    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        """One optimizer step on the summed loss of all batches of all data ranks. Where a batch has a teacher's tokens,
        `Outputs.top_k` has this model's log-probs of the same ones.

        Raises FloatingPointError if the gradient is not finite; the weights are then unchanged. Does not move the schedules.
        """

    def advance_schedule(self) -> None:
        """Advance the schedules of the learning rate and of weight decay by one.

        They count steps of the algorithm, as NeMo-RL's do ("Step LR scheduler once per train() call, not per global batch",
        nemo_rl/models/policy/workers/megatron_policy_worker.py), and such a step may hold several updates: all of them have
        one rate. Called after the last of them.
        """

    def offload(self, keep_weights: bool = False) -> None:
        """Give the device's memory back: what is in it waits on the host, to the last bit, but for gradients: each step
        makes its own. Until `reload` only `shapes`, `layout` and, with keep_weights, `local` may be asked for. Called again
        without keep_weights, the weights go as well."""

    def reload(self) -> None:
        """Bring everything back that is away."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the policy in full, in a fixed order, in the precision it is served in. Collective: all ranks must
        exhaust it. The tensor is only good until the next one is asked for, and only rank 0 of the component gets a real one
        (others get an empty tensor)."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor on disk, in the order of a checkpoint."""

    def layout(self) -> list[Region]:
        """Every entry of the policy that this rank holds, replicas too. The same for as long as the backend lives."""

    def local(self, tensor: str) -> torch.Tensor:
        """The local tensor that regions name so, as it is now, without a graph. Its precision may be higher than the served."""

    def shards(self, copy: bool = False) -> Shards:
        """This rank's share of weights, optimizer, schedule and random state, for `Shards.write`.

        copy: in memory of its own, so that training can go on before it is written.
        """

    def load(self, folder: Path) -> None:
        """Restore what all ranks' shards below `folder` hold, to the last bit at the same layout.

        Raises ValueError if it does not fit this model.
        """
