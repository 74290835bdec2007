"""The Protocol of a generation backend: an engine that the caller steps, and whose weights it replaces in place.

Every rank of an engine (its tensor- and pipeline-parallel peers) makes the same calls with the same arguments in the same
order. Only the written weights differ: each rank writes its own shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.boxes import Region
from pipeline.generate.engine_state import MemoryPart
from pipeline.types import Completion, Likelihood, LikelihoodRequest, Request, VersionSpan


@dataclass(frozen=True, slots=True)
class UpdateUnit:
    """Tensors of this rank that are updated together, such as one module of the engine's model."""

    name: str
    regions: tuple[Region, ...]  # entries to write; the backend itself fills entries that no region covers (padding)


class WeightUpdate(Protocol):
    """An update of all weights. The engine must not be used between its creation and `commit`.

    Either call `load` with full tensors, or write every unit of the layout through `target` and finish it, in the same order on
    all ranks of the engine. An abandoned update leaves a mixture of old and new weights under the old version; only another
    update repairs it.
    """

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load every tensor in full, by its name on disk.

        The backend may keep a tensor, so the caller must not reuse its memory. Raises ValueError if a name or a shape is wrong
        or a tensor is missing.
        """

    def target(self, unit: str, tensor: str) -> torch.Tensor:
        """Return the tensor into which to write the regions of `tensor` until `finish`. Opens the unit if necessary."""
        ...

    def in_place(self, unit: str) -> bool:
        """Return whether `target` is the tensor that the engine reads, so that unwritten entries keep their values."""
        ...

    def finish(self, unit: str) -> None:
        """Convert a unit whose regions are all written to the form that the kernels read. May be collective over the engine."""

    def commit(self, version: int, recompute_kv_cache: bool = True) -> None:
        """Serve the finished units as `version`, and use no cached prefix of the old weights from now on.

        Running requests continue. With recompute_kv_cache their keys and values are recomputed; otherwise the keys and values
        of the old weights stay in use. Raises RuntimeError if a unit of the layout is not finished.
        """


class GenerateBackend(Protocol):
    """An engine: VLLMBackend, TransformersBackend.

    A request is pending from `add` until `step` or `cut` returns its completion.

    `add`, `step`, `cut` and `likelihoods` raise RuntimeError before the first commit, from an update to its commit, and while
    memory is released by `sleep`.
    """

    def add(self, requests: list[Request]) -> None:
        """Queue requests. Raises ValueError, naming the request, if its prompt leaves no room for one new token."""

    def step(self) -> list[Completion]:
        """Advance every running request, and return the completions that ended. Return [] if there is nothing to do."""
        ...

    def cut(self, ids: list[str]) -> list[Completion]:
        """End these requests now, with finish "length", and return their completions in this order.

        The completion of a request without a drawn token is empty. For a request that has ended but was not returned yet, the
        completion is its real one. Raises ValueError, and cuts nothing, if a request is not pending.
        """
        ...

    def likelihoods(self, requests: Sequence[LikelihoodRequest]) -> list[Likelihood]:
        """Return the log-probs of each request's scored tokens, in this order.

        They depend only on these requests and on the weights, to the last bit (on GPUs with policy.deterministic). They do not
        depend on the engine or on its earlier requests. Raises ValueError, naming the request, if it has no token to score or
        does not fit max_model_len, and RuntimeError if a request is pending.
        """
        ...

    def progress(self) -> dict[str, tuple[VersionSpan, ...]]:
        """Return id -> version spans drawn so far, for each pending request; () if none is drawn. Callable at any time."""
        ...

    def readings(self) -> dict[str, float]:
        """Return the engine's load by names of `pipeline.monitor.readings`. Another thread may call this at any time."""
        return {"running": float(self.pending)}

    @property
    def pending(self) -> int:
        """Number of pending requests."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Maximum requests that run at once; others wait."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor on disk, by name, in the order of a checkpoint."""
        ...

    def layout(self) -> list[UpdateUnit]:
        """Return every unit of this rank, in the model's order; tensor names in regions are unique within the rank."""
        ...

    def update(self) -> WeightUpdate:
        """Begin to replace all weights."""
        ...

    def sleep(self, keep_weights: bool = False) -> None:
        """Free the device memory of the weights and of the KV cache.

        With `keep_weights` the weights are copied to the host. Otherwise they are lost until the next update. Raises
        RuntimeError if a request is pending, an update is in progress, or the engine sleeps already.
        """

    def wake(self, part: MemoryPart) -> None:
        """Allocate memory again: first "weights", at the same addresses, so that an update can write them; then "cache".

        Raises RuntimeError if `part` is not the next part to wake.
        """
