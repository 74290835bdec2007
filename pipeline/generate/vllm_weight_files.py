"""Let vLLM load a model's files as Hetstep reads them: each tensor from the file that the index names.

vLLM's own loader yields every tensor of every shard, so of several copies of a tensor it uses the last. Also, in a folder that
has both `model.safetensors` and an index, it follows the index, unlike transformers. An engine reads files only for the base
weights under adapters and for a draft model; all other weights come from the train ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from typing_extensions import override
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from pipeline.models.weight_files import WeightFiles, read_weight_files
from pipeline.recipe.problems import Problem, RecipeError

LOAD_FORMAT = "hetstep"
"""vLLM's `load_format` of this loader."""


@register_model_loader(LOAD_FORMAT)
class CheckpointLoader(DefaultModelLoader):
    """vLLM's default loader, without the copies of tensors that `pipeline/models/weight_files.py` does not read.

    It reads a draft model's files of other formats than safetensors in vLLM's own way.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="hf"))

    # vLLM annotates a Generator, but only iterates over the result.
    @override
    def _get_weights_iterator(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, source: DefaultModelLoader.Source
    ) -> Iterator[tuple[str, torch.Tensor]]:
        patterns = source.allow_patterns_overrides
        folder, _, safetensors, _ = self._prepare_weights(
            source.model_or_path, source.subfolder, source.revision, source.fall_back_to_pt, patterns
        )
        weight_files = read_weight_files(Path(folder)) if safetensors and patterns is None else WeightFiles()
        if weight_files.faults:
            name, fault = next(iter(weight_files.faults.items()))
            raise RecipeError(Problem("policy.model_name", "unavailable-model", f"{folder}/{name} {fault}"))
        return self._read(weight_files, source.prefix) if weight_files.files else super()._get_weights_iterator(source)

    def _read(self, weight_files: WeightFiles, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        load = self.load_config
        for path in weight_files.files.values():
            weights = safetensors_weights_iterator(
                [str(path)],
                load.use_tqdm_on_load,
                load.safetensors_load_strategy,
                local_expert_ids=self.local_expert_ids,
                safetensors_prefetch_num_threads=load.safetensors_prefetch_num_threads,
                safetensors_prefetch_block_size=load.safetensors_prefetch_block_size,
            )
            for name, tensor in weights:
                if name in weight_files.tensors and weight_files.tensors[name].path == path:
                    yield prefix + name, tensor
