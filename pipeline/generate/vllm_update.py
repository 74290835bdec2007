"""Replace the weights of a live vLLM model, module by module; each rank writes its own shard.

If a module's live tensors are its raw parameters, shards are written into them. Otherwise the module alone goes through vLLM's
layer-wise reload: its raw parameters get memory, shards and fills are written, vLLM processes them as after a first load, and
the result is copied into the storage in use, so CUDA graphs stay valid. An opaque module collects its tensors on disk in full
and loads them with vLLM's own loader. Tensors derived from several modules (attention's absorbed projections, packed copies on
CPU) are recomputed once all units are finished.

vLLM's reload functions are private; the version is pinned. Quantised checkpoints are not supported; the policy's are not
quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import _copy_and_restore_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from pipeline.generate.generate_backend import WeightUpdate
from pipeline.generate.vllm_layout import (
    ModuleUnit,
    VLLMModel,
    raw_name,
    restore_live_tensors,
    restore_raw_parameters,
    unwrap_loaders,
)
from pipeline.generate.vllm_reload import pack_embeddings, pack_experts, reload
from pipeline.generate.weight_checks import checked_weights
from pipeline.models.precision import served_dtype


class VLLMUpdate(WeightUpdate):
    """A WeightUpdate of one rank. A model has at most one open update; `give_up` ends an update that is not committed.

    units: a function that returns this rank's layout, called on first use. `commit` calls serve(version, recompute_kv_cache).
    """

    def __init__(
        self,
        model: VLLMModel,
        config: VllmConfig,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        units: Callable[[], Mapping[str, ModuleUnit]],
        serve: Callable[[int, bool], None],
    ) -> None:
        self._model, self._config, self._shapes, self._tied = model, config, shapes, tied
        self._units, self._serve = units, serve
        self._modules = dict(model.named_modules())
        self._targets: dict[str, dict[str, torch.Tensor]] = {}  # by open unit, by tensor
        self._plain: dict[str, bool] = {}  # cached, because an open unit's tensors are raw
        self._left: set[str] | None = None  # unfinished units with regions; None before the first use
        self._ready = False

    @override
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        reload(self._model, self._config, checked_weights(weights, self._shapes, self._tied))
        self._ready = True

    @override
    def target(self, unit: str, tensor: str) -> torch.Tensor:
        if unit not in self._targets:
            if unit not in self._unfinished_units():
                raise RuntimeError(f"unit '{unit}' is already finished in this update")
            self._targets[unit] = self._attempt(self._begin, unit)
        return self._targets[unit][tensor]

    @override
    def in_place(self, unit: str) -> bool:
        if unit not in self._plain:
            described = self._units()[unit]
            self._plain[unit] = not described.opaque and _is_plain(self._modules[described.modules[0]], described)
        return self._plain[unit]

    @override
    def finish(self, unit: str) -> None:
        if unit not in self._targets:
            raise RuntimeError(f"unit '{unit}' is not open")
        self._attempt(self._end, unit)
        del self._targets[unit]
        unfinished = self._unfinished_units()
        unfinished.remove(unit)
        if unfinished:
            return
        for name, described in self._units().items():
            if not described.unit.regions:  # this rank has only constants of it, such as padding
                self._targets[name] = self._attempt(self._begin, name)
                self._attempt(self._end, name)
                del self._targets[name]
        self._derive()
        self._ready = True

    @override
    def commit(self, version: int, recompute_kv_cache: bool = True) -> None:
        if not self._ready:
            units = self._unfinished_units()
            raise RuntimeError(f"commit of version {version}: {len(units)} units are not finished; one is '{min(units)}'")
        self._serve(version, recompute_kv_cache)

    def give_up(self) -> None:
        """Put the live tensors of open units back into their modules.

        Their contents are not rolled back: values that were written stay.
        """
        for unit in list(self._targets):
            self._put_back(unit)

    def _unfinished_units(self) -> set[str]:
        if self._left is None:
            self._left = {name for name, described in self._units().items() if described.unit.regions}
        return self._left

    def _attempt(self, do: Callable, unit: str) -> Any:
        """Return `do(unit)`, called in vLLM's context. Restore the unit's live tensors on an error."""
        try:
            with torch.no_grad(), set_current_vllm_config(self._config):
                return do(unit)
        except BaseException:
            self._put_back(unit)
            raise

    def _put_back(self, unit: str) -> None:
        self._targets.pop(unit, None)
        for module in self._units()[unit].modules:
            restore_live_tensors(self._modules[module])

    def _begin(self, unit: str) -> dict[str, torch.Tensor]:
        """Write every entry of a unit that its regions do not cover, and return tensor name -> tensor to write regions into."""
        described = self._units()[unit]
        layer = self._modules[described.modules[0]]
        if described.opaque:
            device, precision = get_layerwise_info(layer).restore_device, self._config.model_config.dtype
            return {
                r.tensor: torch.empty(r.box.size, dtype=served_dtype(r.name, precision), device=device)
                for r in described.unit.regions
            }
        if not self.in_place(unit):
            self._materialize(unit, described.written)
        targets = {raw_name(unit, name): tensor.data for name, tensor in get_layer_tensors(layer).items()}
        for tensor in described.holes:
            _zero_holes(tensor, targets[tensor], described)
        for fill in described.fills:
            _view(targets[fill.tensor], fill.size, fill.strides, fill.offset).fill_(fill.value)
        return {tensor: targets[tensor] for tensor in described.written}

    def _end(self, unit: str) -> None:
        described = self._units()[unit]
        if self.in_place(unit):
            return
        if described.opaque:
            for module in described.modules:
                self._materialize(module)
            staged = self._targets[unit]
            self._model.load_weights((region.name, staged[region.tensor]) for region in described.unit.regions)
        for module in described.modules:
            _process(self._modules[module], described.written, module)

    def _materialize(self, module: str, written: frozenset[str] = frozenset()) -> None:
        """Allocate a module's raw parameters.

        Parameters that are not `written` keep their live values if shape and dtype are equal; otherwise they are zero.
        """
        layer = self._modules[module]
        live = get_layer_tensors(layer)
        restore_raw_parameters(layer)
        materialize_layer(layer, get_layerwise_info(layer))
        unwrap_loaders(layer)
        for name, tensor in get_layer_tensors(layer).items():
            old = live.get(name)
            if old is tensor or raw_name(module, name) in written:
                continue
            if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
                tensor.data.copy_(old.data)
            else:
                tensor.data.zero_()

    def _derive(self) -> None:
        with torch.no_grad(), set_current_vllm_config(self._config):
            for layer in self._modules.values():
                if is_deferred_attention_layer(layer):
                    layer.process_weights_after_loading(self._config.model_config.dtype)  # pyright: ignore[reportCallIssue]  # nn.Module's stub
            if current_platform.is_cpu():
                pack_embeddings(self._model)


def _is_plain(layer: torch.nn.Module, described: ModuleUnit) -> bool:
    """Return whether a module's live tensors are its raw parameters, so that they can be written without further processing.

    The exact types decide. Equal shapes and strides do not suffice, because some kernels permute in place or keep copies. On a
    CPU the packed copies of embeddings and lm_head are updated once all units are finished.
    """
    (module,) = described.modules
    live = {raw_name(module, name): tensor for name, tensor in get_layer_tensors(layer).items()}
    if is_deferred_attention_layer(layer) or live.keys() != described.raw.keys():
        return False
    if any((tuple(t.shape), tuple(t.stride()), t.dtype) != described.raw[name] for name, t in live.items()):
        return False
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return True  # norms, convolutions, attention sinks
    if type(method) is UnquantizedFusedMoEMethod:
        return current_platform.is_cuda() and method.unquantized_backend.name in ("TRITON", "BATCHED_TRITON")
    if type(method) is UnquantizedLinearMethod:
        return current_platform.is_cuda()
    return type(method) is UnquantizedEmbeddingMethod


def _process(layer: torch.nn.Module, written: frozenset[str], module: str) -> None:
    """Process raw parameters for the kernels, in the storage that they read, as vLLM's reload does at a layer's end."""
    info = get_layerwise_info(layer)
    # vLLM does not copy back buffers that are not listed here, as no checkpoint holds them.
    no_arguments: Any = None  # vLLM reads only the names here
    info.loaded_weights = [(name, no_arguments) for name in layer._buffers if raw_name(module, name) in written]
    layer.__dict__.pop("_already_called_process_weights_after_loading", None)
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()  # pyright: ignore[reportCallIssue]  # nn.Module's stub
        if current_platform.is_cpu():
            pack_experts(layer)
    _copy_and_restore_kernel_tensors(layer, info)
    info.reset()


def _zero_holes(name: str, tensor: torch.Tensor, described: ModuleUnit) -> None:
    """Zero the entries that no region or fill covers. Other entries keep their values, which may be a delta refit's base."""
    holes = torch.ones_like(tensor, dtype=torch.bool)
    for region in described.unit.regions:
        if region.tensor == name:
            _view(holes, region.box.size, region.strides, region.offset).fill_(False)
    for fill in described.fills:
        if fill.tensor == name:
            _view(holes, fill.size, fill.strides, fill.offset).fill_(False)
    tensor.masked_fill_(holes, 0)


def _view(tensor: torch.Tensor, size: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    return tensor.as_strided(size, strides, tensor.storage_offset() + offset)
