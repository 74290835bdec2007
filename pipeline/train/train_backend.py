"""The protocol of a training backend.

Every method is SPMD: all ranks of the train component call it together, with the same arguments except for `batches`. Ranks
with the same `data_rank` (peers in tensor, pipeline or context parallelism) get the same batches, and all data-parallel ranks
get the same number of batches. Weights have their Hugging Face names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pipeline.boxes import Region
from pipeline.config import PolicyConfig
from pipeline.files.stored_files import FileKey
from pipeline.train.shards import Shards
from pipeline.types import Head, LossOutput, Outputs, PackedBatch, StepResult

Loss = Callable[[Outputs, PackedBatch], LossOutput]
"""A function of (the model's outputs with a graph, the batch) that returns the batch's share of the loss."""


Phase = Callable[[str], contextlib.AbstractContextManager[object]]
"""A function from a name to a context that reports its block as a phase of this name."""


@dataclass(frozen=True, slots=True)
class ModelRole:
    """The purpose of a model, which decides what a backend builds for it."""

    head: Head = "logprobs"
    trained: bool = True  # False: no gradients and no optimizer; weights in policy.precision
    reference: bool = False  # keep the initial weights for `forward(..., "reference")`
    entropy: bool = False  # outputs contain the entropy
    truncated: bool = False  # the policy's log-probs are of the distribution after policy.generation's top_p and top_k
    serves_adapters: bool = False  # of a policy with adapters: refits read these and not merged weights
    offload: bool = False  # only if not trained: keep weights in host memory outside forward passes
    phase: Phase = contextlib.nullcontext  # reports long phases of loading


class TrainBackend(Protocol):
    """One rank's part of a model, and of its optimizer if it is trained: FSDPBackend, MegatronBackend."""

    data_rank: int  # among the data-parallel ranks
    data_size: int  # number of data-parallel ranks
    device: torch.device

    def forward(self, batches: Sequence[PackedBatch], model: str = "policy", top_k: int = 0) -> list[Outputs]:
        """Return outputs without a graph, one per batch.

        model: "policy" or "reference". The reference has the weights as they were loaded and is never truncated, because its
        truncation would cut other tokens than the policy's. top_k: also return the most likely tokens of each distribution.
        """
        ...

    def step(self, batches: Sequence[PackedBatch], loss: Loss) -> StepResult:
        """Take one optimizer step on the summed loss of all batches of all data-parallel ranks.

        For a batch with a teacher's tokens, `Outputs.top_k` contains this model's log-probs of these tokens. Batches with
        `balance` add the load-balancing loss (load_balancing.py), which the metric `loss` leaves out. Raises
        FloatingPointError if the gradient is not finite; the weights are then unchanged. Does not advance the schedules.
        """
        ...

    def advance_schedule(self) -> None:
        """Advance the schedules of the learning rate and of weight decay by one.

        Schedules count steps of the algorithm, as in NeMo-RL ("Step LR scheduler once per train() call, not per global batch",
        nemo_rl/models/policy/workers/megatron_policy_worker.py). A step may hold several updates, which all have one learning
        rate. Call this after the last of them.
        """

    def new_rates(self, policy: PolicyConfig) -> Callable[[], None]:
        """Return a function that switches to the learning rate and the schedule of `policy`, from the next update on.

        The new schedule continues at the current step, as if it had been used from the start. `load` does the same, so a run
        that changes its rate equals a run that resumes with the new rate. The optimizer's state stays. policy: must not differ
        from the current policy in anything else. Nothing changes until the returned function is called. Raises RecipeError, or
        an error of the optimizer or schedule classes, for settings that cannot be used.
        """
        ...

    def offload(self, keep_weights: bool = False) -> None:
        """Move weights and optimizer state to host memory, without any change of their bits, and free the device's memory.

        Gradients are dropped: each step computes its own. Until `reload`, call only `shapes`, `layout` and, with keep_weights,
        `local_tensor`. A second call without keep_weights moves the weights as well.
        """

    def reload(self) -> None:
        """Move everything that was offloaded back to the device."""

    def weights(self, model: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every whole tensor of the policy, in a fixed order and in the precision in which it is served.

        For a role that serves adapters these are the adapters' tensors. model: yield the model's merged weights for such a role
        too. Collective: all ranks must exhaust it. A tensor is valid until the next one is requested. Only rank 0 of the
        component gets the tensors; other ranks get empty ones.
        """
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name on disk: shape} in a checkpoint's order; of the adapters for a role that serves them, else of the model."""
        ...

    def layout(self) -> list[Region]:
        """Return the regions of the policy's tensors that this rank holds, replicas included. They never change."""
        ...

    def local_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of this rank by its name in `layout`, without a graph.

        Its precision may be higher than the one in which it is served.
        """
        ...

    def shards(self, copy: bool = False) -> Shards:
        """Return this rank's share of weights, optimizer, schedule and random state, for `Shards.write`.

        copy: copy the tensors into new memory, so that training can continue before the shards are written.
        """
        ...

    def load(self, folder: Path, key: FileKey | None = None) -> None:
        """Restore the state from all ranks' shards in `folder`, to the last bit if the layout is the same.

        key: decrypts encrypted shards. Raises RecipeError if the checkpoint does not fit the recipe, ValueError if it is
        incomplete.
        """
