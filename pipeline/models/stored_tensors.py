"""Find the tensors of a model in a checkpoint that names or joins them in another way than transformers saves them.

transformers loads more forms of a checkpoint than it saves: names of earlier versions (`vision_tower.vision_model.`), and the
experts of a layer as one tensor, as Qwen publishes Qwen3.5. Its own renaming says which tensor in memory a stored one is, and
its own conversion for saving which tensors on disk that one consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pipeline.boxes import Box, Piece
from pipeline.models.hugging_face import on_disk, state
from pipeline.models.recorded_layout import record_all, restrict
from pipeline.models.weight_files import TensorEntry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint under the names with which transformers saves them."""

    entries: dict[str, TensorEntry]  # a part of a stored tensor has this tensor's file, start and nbytes
    _parts: dict[str, Piece]  # of entries with another name or shape than the stored tensor: their places in it

    @classmethod
    def of(cls, model: PreTrainedModel, stored: Mapping[str, TensorEntry]) -> StoredTensors:
        """Return the tensors of a checkpoint. model: on the meta device. stored: the tensors as they are stored.

        A stored tensor that transformers does not load as a whole tensor of the model keeps its name.
        """
        memory = state(model)
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        loaded: dict[str, str] = {}  # by name in memory
        for name in stored.keys() - on_disk(model, memory).keys():
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, memory)
            if pattern is None and target in memory and tuple(memory[target].shape) == stored[name].shape:
                loaded[target] = name
        saved = record_all(lambda tensors: on_disk(model, tensors), {target: stored[loaded[target]].shape for target in loaded})
        entries, parts = dict(stored), {}
        for name, (shape, pieces) in saved.items():
            source = loaded[pieces[0].name]
            if name not in stored and len(pieces) == 1:
                entries.pop(source, None)
                entries[name] = replace(stored[source], shape=shape)
                parts[name] = replace(pieces[0], name=source)
        return cls(entries, parts)

    def read(self, name: str, box: Box, stored: Callable[[str, Box], torch.Tensor]) -> torch.Tensor:
        """Return a box of the tensor `name` of `entries`. stored: a function that reads a box of a stored tensor."""
        if name not in self._parts:
            return stored(name, box)
        (part,) = restrict([self._parts[name]], box)
        return stored(part.name, part.source).reshape(box.size)
