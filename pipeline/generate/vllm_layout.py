"""Record to which entries of this rank's raw parameters of a vLLM model each box of a tensor on disk is copied.

Raw parameters are those that a model has before vLLM processes them for its kernels. `record` puts the model's tensors on the
meta device, runs vLLM's own `load_weights` once on meta tensors of the shapes on disk, and traces every copy
(`pipeline/models/recorder.py`). So no code depends on a model family.

A module whose loader does more than copy is opaque: it receives its tensors on disk in full and loads them with the original
loader. If more entries are written to a raw parameter than it has, writes overlap, and its module is opaque too.

vLLM's reload functions are private; the version is pinned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from pipeline.boxes import Piece, region, whole
from pipeline.generate.generate_backend import UpdateUnit
from pipeline.models.precision import served_dtype
from pipeline.models.recorder import Recorder
from pipeline.models.strides import Shape, contiguous_strides

Geometry = tuple[Shape, Shape, torch.dtype]  # shape, strides, dtype


class VLLMModel(torch.nn.Module):
    """The type of vLLM's models, which have no common base class. For annotations only."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load tensors by name, and return the names of the loaded parameters; None if the model does not report them."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Fill:
    """Entries of a raw parameter that the loader sets to a constant, as a strided view of it."""

    tensor: str  # this rank's name of the raw parameter
    offset: int  # entries
    size: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class ModuleUnit:
    """A unit of the layout, with its modules and the entries to set besides its regions."""

    unit: UpdateUnit
    modules: tuple[str, ...]  # names in the model; several if opaque modules share tensors on disk
    opaque: bool  # its regions are full tensors on disk, in memory of their own
    raw: dict[str, Geometry]  # of the module's raw parameters and buffers; empty if it is opaque
    written: frozenset[str]  # tensors that the loader writes, as far as known
    holes: frozenset[str]  # written tensors with entries that the loader leaves; these become zero
    fills: tuple[Fill, ...]  # to write in this order, before the regions


def raw_name(module: str, parameter: str) -> str:
    """Return the name by which regions refer to a raw parameter."""
    return f"{module}.{parameter}" if module else parameter


@torch.no_grad()
def record(model: VLLMModel, shapes: Mapping[str, Shape], precision: torch.dtype, complete: bool) -> dict[str, ModuleUnit]:
    """Return the units of a vLLM model on this rank, by name, in the model's order; the model is unchanged.

    shapes: of every tensor on disk. precision: the policy's. complete: whether every parameter must be loaded (quantized models
    have some that are not). Raises ValueError if one is not loaded, or is loaded in a way that cannot be traced.
    """
    modules = dict(model.named_modules())
    live = {name for name, _ in model.named_parameters()}  # without tied copies
    with _on_meta(modules):
        raw = {
            (module, raw_name(module, name)): tensor
            for module, layer in modules.items()
            for name, tensor in get_layer_tensors(layer).items()
        }
        before = {name for name, _ in model.named_parameters()}  # without those that processing created
        sources = {
            name: torch.empty(shape, dtype=served_dtype(name, precision), device="meta") for name, shape in shapes.items()
        }
        with Recorder(sources, raw) as recorder:
            loaded = model.load_weights(iter(sources.items()))
        check_loaded(loaded if complete else None, live & before, {name for name, _ in model.named_parameters()} - before)
        geometry = {key: (tuple(t.shape), tuple(t.stride()), t.dtype) for key, t in raw.items()}
    written = {tensor for _, tensor in recorder.writes}
    if unseen := [
        n for n in (loaded or set()) & live & before if n not in written and n.rpartition(".")[0] not in recorder.opaque
    ]:
        raise ValueError(f"vLLM loaded '{min(unseen)}' without a copy into it; only copies can be traced")
    for (module, tensor), writes in recorder.writes.items():
        if writes.entries > math.prod(geometry[module, tensor][0]):
            recorder.opaque[module] |= writes.names()
    return _units(modules, recorder, geometry, shapes)


def check_loaded(loaded: set[str] | None, expected: set[str], created: set[str]) -> None:
    """Raise ValueError unless a vLLM loader has loaded all `expected` parameters and created none.

    loaded: the parameters that the loader reports; None if unknown. created: parameters that the loader created, which vLLM's
    reload would drop.
    """
    if loaded is not None and (missed := expected - loaded):
        raise ValueError(f"vLLM did not load {len(missed)} of its parameters; the first is '{min(missed)}'")
    if created:
        raise ValueError(
            f"vLLM creates '{min(created)}' only when it loads a checkpoint, so this model's weights cannot be replaced"
        )


@contextmanager
def _on_meta(modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Give every module its raw parameters, on meta, with their original loaders, within the context."""
    placed: list[torch.nn.Module] = []
    stand_ins: dict[int, torch.Tensor] = {}
    try:
        for layer in modules.values():
            placed.append(layer)
            restore_raw_parameters(layer)
            for name, tensor in layer._parameters.items():
                # vLLM leaves biases on the device, and a router's bias, which two modules share. Loaders read the buffers.
                if tensor is not None and not tensor.is_meta:
                    meta = stand_ins.setdefault(id(tensor), to_meta_tensor(tensor))
                    layer._parameters[name] = meta  # pyright: ignore[reportArgumentType]  # a parameter's meta tensor is one
            unwrap_loaders(layer)
        yield
    finally:
        for layer in placed:
            restore_live_tensors(layer)


def restore_raw_parameters(layer: torch.nn.Module) -> None:
    """Give a module its raw parameters on meta, and keep its live tensors for `restore_live_tensors`."""
    info = get_layerwise_info(layer)
    if info.can_load() or info.kernel_tensors is not None:
        raise RuntimeError(f"{type(layer).__name__}: vLLM has begun to reload it and has not finished")
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)


def unwrap_loaders(layer: torch.nn.Module) -> None:
    """Unwrap a module's loaders. vLLM's reload wraps them and does not unwrap them."""
    for tensor in get_layer_tensors(layer).values():
        while getattr(getattr(tensor, "weight_loader", None), "__name__", None) == "online_process_loader":
            tensor.weight_loader = tensor.weight_loader.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]  # vLLM's own


def restore_live_tensors(layer: torch.nn.Module) -> None:
    """Restore the live tensors of a module that is between `restore_raw_parameters` and the end of its reload.

    Do nothing for other modules.
    """
    info = get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(layer, info)
    info.reset()


# ---- from recorded writes to units


def _units(
    modules: Mapping[str, torch.nn.Module],
    recorder: Recorder,
    geometry: Mapping[tuple[str, str], Geometry],
    shapes: Mapping[str, Shape],
) -> dict[str, ModuleUnit]:
    raw: dict[str, dict[str, Geometry]] = defaultdict(dict)
    for (module, tensor), location in geometry.items():
        raw[module][tensor] = location
    written: dict[str, list[str]] = defaultdict(list)
    for module, tensor in recorder.writes:
        written[module].append(tensor)
    groups = _opaque_groups(modules, recorder)
    units = {}
    for module in modules:
        if module in groups:
            members, names = groups[module]
            if module == members[0]:
                tensors = frozenset(tensor for member in members for tensor in raw[member])
                units[module] = ModuleUnit(_full(module, names, shapes), members, True, {}, tensors, frozenset(), ())
        elif module in written:
            regions, fills, holes = [], [], set()
            for tensor in written[module]:
                writes = recorder.writes[module, tensor]
                regions += writes.regions
                fills += [Fill(tensor, *fill) for fill in writes.fills]
                if writes.entries < math.prod(raw[module][tensor][0]):
                    holes.add(tensor)
            unit, tensors = UpdateUnit(module, tuple(regions)), frozenset(written[module])
            units[module] = ModuleUnit(unit, (module,), False, raw[module], tensors, frozenset(holes), tuple(fills))
    return units


def _opaque_groups(modules: Mapping[str, torch.nn.Module], recorder: Recorder) -> dict[str, tuple[tuple[str, ...], set[str]]]:
    """Return module -> (modules that must be loaded with it, in the model's order; the tensors on disk that they use)."""
    takes: dict[str, set[str]] = defaultdict(set)
    for (module, _), writes in recorder.writes.items():
        takes[module] |= writes.names()
    for module, names in recorder.opaque.items():
        takes[module] |= names
    takers: dict[str, set[str]] = defaultdict(set)
    for module, names in takes.items():
        for name in names:
            takers[name].add(module)
    groups: dict[str, tuple[tuple[str, ...], set[str]]] = {}
    for first in recorder.opaque:
        if first in groups:
            continue
        members, names, new = set(), set(), {first}
        while new:
            members |= new
            names = set().union(*(takes[module] for module in members))
            new = set().union(*(takers[name] for name in names)) - members
        group = tuple(module for module in modules if module in members), names
        groups |= dict.fromkeys(members, group)
    return groups


def _full(module: str, names: set[str], shapes: Mapping[str, Shape]) -> UpdateUnit:
    """Return a unit of full tensors on disk, in the order of a checkpoint; each tensor has memory of its own."""
    regions = []
    for name in shapes:
        if name in names:
            box = whole(shapes[name])
            regions.append(region(Piece(name, box, box), f"{module}:{name}", contiguous_strides(shapes[name])))
    return UpdateUnit(module, tuple(regions))
