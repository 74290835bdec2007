"""Serve a policy's adapters by vLLM's own LoRA: the base weights stay, and an update delivers A and B alone.

Every rank of an engine receives whole adapters, in policy.precision, and vLLM cuts them for the rank. vLLM has LoRA kernels for
GPUs and plain operators for CPUs. It has no DoRA. The manager of adapters is private to vLLM; the version is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from typing_extensions import override
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from pipeline.boxes import Piece, region, whole
from pipeline.generate.generate_backend import UpdateUnit, WeightUpdate
from pipeline.generate.vllm_weight_files import LOAD_FORMAT
from pipeline.generate.weight_checks import checked_weights
from pipeline.models.strides import contiguous_strides
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import ServedAdapters

UNIT = "adapters"
_ID = 1  # vLLM's number of the adapters


def engine_arguments(adapters: ServedAdapters) -> dict[str, Any]:
    """Return the engine's arguments: a LoRA rank that vLLM supports, and base weights from the files of policy.model_name.

    Only the adapted kinds of layers, by the last parts of their names, get LoRA. LoRA on experts would take memory and time,
    and vLLM's CPU backend does not have it.
    """
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= adapters.dim]
    if not ranks:
        message = f"got adapter with LoRA rank {adapters.dim}; vLLM has at most {max(get_args(MaxLoRARanks))}. Try merged"
        raise RecipeError(Problem("policy.generation.lora_refit", "unsupported", message))
    kinds = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in adapters.shapes})
    served = {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks), "lora_target_modules": kinds}
    return served | {"load_format": LOAD_FORMAT}


class VLLMAdapters:
    """Receives the adapters on one rank of an engine, and makes vLLM serve them."""

    request = LoRARequest("policy", _ID, "refit")  # of every request; nothing is read from the path

    def __init__(self, adapters: ServedAdapters, runner: Any, precision: torch.dtype, device: torch.device) -> None:
        """Allocate memory for the adapters. Raises RecipeError if vLLM's LoRA does not apply to an adapted layer."""
        self._adapters, self._precision = adapters, precision
        self._manager = runner.lora_manager._adapter_manager
        model = self._manager.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper = mapper.get_rename_mapper() if mapper is not None else None
        self.received = {name: torch.empty(shape, dtype=precision, device=device) for name, shape in adapters.shapes.items()}
        self._check_layers(self._model())

    def unit(self) -> UpdateUnit:
        """Return the only unit of the layout, which has every tensor in full."""
        regions = []
        for name, shape in self._adapters.shapes.items():
            box = whole(shape)
            regions.append(region(Piece(name, box, box), name, contiguous_strides(shape)))
        return UpdateUnit(UNIT, tuple(regions))

    def activate(self) -> None:
        """Serve the received adapters from now on."""
        self._manager.remove_adapter(_ID)
        self._manager.add_adapter(self._model())
        self._manager.activate_adapter(_ID)

    def _model(self) -> LoRAModel:
        """Return a copy of the received adapters as vLLM's LoRAModel. It is a copy because vLLM multiplies B by the scale."""
        tensors = {f"base_model.model.{name}": tensor.clone() for name, tensor in self.received.items()}
        helper = PEFTHelper(
            r=self._adapters.dim,
            lora_alpha=self._adapters.alpha,  # pyright: ignore[reportArgumentType] - vLLM computes with it
            target_modules=[],
            use_rslora=self._adapters.rslora,
        )
        device = next(iter(tensors.values())).device
        return LoRAModel.from_lora_tensors(
            _ID, tensors, helper, device=str(device), dtype=self._precision, weights_mapper=self._mapper
        )

    def _check_layers(self, model: LoRAModel) -> None:
        """Raise RecipeError if vLLM would ignore an adapter, or would need one for each part of a fused layer (GLM-4)."""
        applied = set(self._manager.modules) - self._manager.packed_modules.keys()
        for module, parts in self._manager.packed_modules.items():
            applied |= set(parts) if module in self._manager.modules else set()
        if ignored := sorted(set(model.loras) - applied):
            message = f"got adapter, but vLLM has no LoRA for {ignored[0]} and {len(ignored) - 1} other layers. Try merged"
            raise RecipeError(Problem("policy.generation.lora_refit", "unsupported", message))


class AdapterUpdate(WeightUpdate):
    """An update of the adapters of one rank. `commit` calls serve(version, recompute_kv_cache)."""

    def __init__(self, adapters: VLLMAdapters, shapes: Mapping[str, tuple[int, ...]], serve: Callable[[int, bool], None]):
        self._adapters, self._shapes, self._serve = adapters, shapes, serve
        self._ready = False

    @override
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in checked_weights(weights, self._shapes, ()):
            self._adapters.received[name].copy_(tensor)
        self._ready = True

    @override
    def target(self, unit: str, tensor: str) -> torch.Tensor:
        if self._ready:
            raise RuntimeError(f"unit '{unit}' is already finished in this update")
        return self._adapters.received[tensor]

    @override
    def in_place(self, unit: str) -> bool:
        return False  # vLLM reads copies

    @override
    def finish(self, unit: str) -> None:
        self._ready = True

    @override
    def commit(self, version: int, recompute_kv_cache: bool = True) -> None:
        if not self._ready:
            raise RuntimeError(f"commit of version {version}: the adapters are not finished")
        with torch.no_grad():
            self._adapters.activate()
        self._serve(version, recompute_kv_cache)

    def give_up(self) -> None:
        """Do nothing: the engine serves its old adapters until a commit."""
