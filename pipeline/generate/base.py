"""What the pipeline asks of a generation backend: an engine that is stepped from outside, its weights replaced in place.

Every rank of an engine (its tensor- and pipeline-parallel peers) makes the same calls with the same arguments in the same
order; where weights are written, each with its own shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.boxes import Region
from pipeline.generate.engine_state import MemoryPart
from pipeline.types import Completion, Request, VersionSpan


@dataclass(frozen=True, slots=True)
class UpdateUnit:
    """Tensors of this rank that are brought up to date together, such as a module of the engine's model."""

    name: str
    regions: tuple[Region, ...]  # what must be written of it; what none covers (padding) the backend fills itself


class WeightUpdate(Protocol):
    """New weights on their way into the engine. From its making until `commit` the engine must not be used.

    Either `load` gets full tensors, or every unit of the layout is written through `target` and then finished, units being
    finished in the same order on all ranks of the engine. An update that is given up leaves a mixture of old and new weights
    under the old version, which only another update mends.
    """

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take every tensor in full, by its name on disk. A tensor may be kept: the caller does not reuse its memory. Raises
        ValueError if a name or a shape is wrong or one is missing."""

    def target(self, unit: str, tensor: str) -> torch.Tensor:
        """Where the regions of that tensor are to be written, until the unit is finished. Opens the unit if it is not open."""

    def in_place(self, unit: str) -> bool:
        """Whether `target` is the very tensor that the engine reads, so that entries not written keep their values."""

    def finish(self, unit: str) -> None:
        """All regions of the unit are written: make it what the kernels read. May be collective over the engine."""

    def commit(self, version: int, recompute_kv_cache: bool = True) -> None:
        """Every unit is finished: serve them as `version`. No cached prefix of the old weights is used any more. Requests that
        run go on; their keys and values are computed anew, or kept as the old weights made them.

        Raises RuntimeError if a unit of the layout was not finished."""


class GenerateBackend(Protocol):
    """A request is pending from `add` until `step` or `cut` hands out its completion.

    `add`, `step` and `cut` raise RuntimeError before the first commit, from an update to its commit, and while a part sleeps.
    """

    def add(self, requests: list[Request]) -> None:
        """Queue requests. Raises ValueError, naming the request, if its prompt leaves no room for one new token."""

    def step(self) -> list[Completion]:
        """Advance every running request; the completions that ended. Returns [] at once when there is nothing to do."""

    def cut(self, ids: list[str]) -> list[Completion]:
        """End these requests where they are, with finish "length"; in this order. One of which no token was drawn gives an
        empty completion; one that has ended, but was not handed out, is given as it ended.

        Raises ValueError, and cuts nothing, if one of them is not pending."""

    def progress(self) -> dict[str, tuple[VersionSpan, ...]]:
        """What has been drawn so far of each pending request, by its id: () if nothing. At any time."""

    @property
    def pending(self) -> int:
        """How many requests are."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor on disk, in the order of a checkpoint."""

    def layout(self) -> list[UpdateUnit]:
        """Every unit of this rank, in the model's order; region tensors are named uniquely within the rank."""

    def update(self) -> WeightUpdate:
        """Begin to replace all weights."""

    def sleep(self, keep_weights: bool = False) -> None:
        """Give back the device's memory of weights and of keys and values. Weights that are not kept, on the host, are lost:
        only an update brings them back. Raises RuntimeError if a request is pending, an update under way, or it sleeps."""

    def wake(self, part: MemoryPart) -> None:
        """First "weights": their memory is there again, at the same places, and an update may write it; then "cache". Raises
        RuntimeError if that is not the next part to wake."""
