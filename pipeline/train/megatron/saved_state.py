"""This rank's part of a checkpoint: boxes of Hugging Face tensors for weights and for the optimizer's state.

Without adapters, the weights are all weights, frozen ones included. With adapters, they are the adapters and a value head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from pipeline.boxes import Box, Piece, whole
from pipeline.config import Problem, RecipeError
from pipeline.models.family import SCORE
from pipeline.models.recorded_layout import Shape, copy_pieces, flat_boxes, restrict
from pipeline.train import checkpoint_state
from pipeline.train.adapters.modules import KEY
from pipeline.train.checkpoint_state import stored_name
from pipeline.train.megatron.adapted_stage import StageAdapters
from pipeline.train.megatron.distributed_optimizer import ParameterRange
from pipeline.train.megatron.local_tensors import LocalTensor
from pipeline.train.shards import BoxReader, Entry
from pipeline.types import Head


@dataclass(frozen=True)
class SavedState:
    """The tensors that a backend writes to its checkpoints and reads from them."""

    local: Mapping[str, LocalTensor]  # of this rank: what is saved
    shapes: Mapping[str, Shape]  # of the tensors on disk that are saved
    copies: Mapping[str, list[str]]  # tensors on disk that are the same parameter here, by the first one's name

    @classmethod
    def of(
        cls, local: Mapping[str, LocalTensor], shapes: Mapping[str, Shape], adapters: StageAdapters | None, head: Head
    ) -> SavedState:
        """Return the saved state of a backend.

        local: all tensors of this rank by global name. shapes: {name: shape} of the tensors on disk, without adapters.
        """
        if adapters is None:
            return cls(local, shapes, {})
        trained = {name: local_tensor for name, local_tensor in local.items() if local_tensor.tensor.requires_grad}
        return cls(trained, ({SCORE: shapes[SCORE]} if head == "values" else {}) | adapters.shapes, adapters.copies)

    def entries(self, ranges: Iterable[ParameterRange]) -> Iterator[Entry]:
        """Yield this rank's part of a checkpoint, without random states. ranges: the optimizer's."""
        of = self._by_tensor()
        for part in ranges:
            local = of[id(part.parameter)]
            for state, values in {"": part.main, **part.state}.items():
                for box, view in boxes(part, values):
                    yield from self._as_hugging_face(view, restrict(local.hugging_face, box), state)
        for name, local in self.local.items():
            # A frozen router, or a router's bias.
            if not local.tensor.requires_grad and is_data_parallel_leader(name):
                yield from self._as_hugging_face(local.tensor.detach(), local.hugging_face)

    def _as_hugging_face(self, part: torch.Tensor, pieces: list[Piece], state: str = "") -> Iterator[Entry]:
        for entry, piece in zip(checkpoint_state.entries(part, pieces, self.shapes, state), pieces, strict=True):
            yield entry
            for copy in () if state else self.copies.get(piece.name, ()):  # files have no tensors that share memory
                yield stored_name(copy), self.shapes[copy], piece.source, entry[-1].clone()

    def optimizer_states(
        self, ranges: Iterable[ParameterRange], reader: BoxReader
    ) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
        """Return {parameter: {state: this rank's range of it}} for the parameters of `ranges`, read from a checkpoint."""
        of = self._by_tensor()
        kinds = sorted({name.split(".", 2)[1] for name in reader.shapes if name.startswith("optimizer.")})
        return {part.parameter: {kind: _state(reader, kind, part, of[id(part.parameter)]) for kind in kinds} for part in ranges}

    def check_tensors(self, folder: Path, reader: BoxReader) -> None:
        """Raise RecipeError unless the checkpoint in `folder` has the tensors that this backend saves."""
        checkpoint_state.check_tensors(folder, reader, self.shapes)
        for name, copies in self.copies.items():
            box = whole(tuple(self.shapes[name]))
            first = reader.read(stored_name(name), box)
            for copy in copies:
                if not torch.equal(first, reader.read(stored_name(copy), box)):
                    message = (
                        f"{folder} has different values in {name} and {copy}, so they were trained with separate As; linear_qkv"
                        " and linear_fc1 have a shared A. Try linear_q, linear_k, linear_v, linear_fc1_gate and linear_fc1_up"
                    )
                    raise RecipeError(Problem(f"{KEY}.target_modules", "contradiction", message))

    def _by_tensor(self) -> dict[int, LocalTensor]:
        return {id(local.tensor): local for local in self.local.values()}


def boxes(part: ParameterRange, values: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a flat range of a parameter, each with its view of `values` [stop - start]."""
    position = 0
    for box in flat_boxes(tuple(part.parameter.shape), part.start, part.stop):
        yield box, values[position : position + box.numel].view(box.size)
        position += box.numel


def layout_of(config: TransformerConfig) -> list[int]:
    """Return the sizes of a layout. A checkpoint's random states are restored if these and the number of ranks are the same."""
    return [
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
        config.expert_model_parallel_size,
    ]


def is_data_parallel_leader(name: str) -> bool:
    """Return whether this rank is the first of its data-parallel peers, which hold the same part of the parameter `name`."""
    if ".local_experts." in name:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _state(reader: BoxReader, kind: str, part: ParameterRange, local: LocalTensor) -> torch.Tensor:
    values = torch.zeros_like(part.main)
    for box, view in boxes(part, values):
        pieces = restrict(local.hugging_face, box)
        copy_pieces(view, pieces, lambda name, source: reader.read(stored_name(name, kind), source))
    return values
