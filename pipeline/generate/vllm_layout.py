"""Record which box of which tensor on disk lies where in this rank's raw parameters of a vLLM model, from vLLM's own loaders.

Raw parameters are what a model has before vLLM processes them for its kernels. `record` puts the model's tensors on the meta
device, runs `load_weights` once on meta tensors of the shapes on disk, and watches every copy (`recorder.py`). No code knows a
family.

A module whose loader computes anything else is opaque: it takes its tensors on disk in full, through the original loader.
Overlap is told by counting: a raw parameter with more entries written than it has makes its module opaque too.

Left out: values. vLLM's reload functions are private; the version is pinned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from pipeline.boxes import Piece, region, whole
from pipeline.generate.base import UpdateUnit
from pipeline.models.precision import served_dtype
from pipeline.models.recorder import Recorder
from pipeline.models.strides import Shape, contiguous_strides

Geometry = tuple[Shape, Shape, torch.dtype]  # shape, strides, dtype


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
    """A unit of the layout, and what is to be done for it besides writing its regions."""

    unit: UpdateUnit
    modules: tuple[str, ...]  # of the model; several where opaque modules share tensors on disk
    opaque: bool  # its regions are tensors on disk in full, in memory of their own
    raw: dict[str, Geometry]  # of the module's raw parameters and buffers; nothing if it is opaque
    written: frozenset[str]  # those that the loader writes, as far as that is known
    holes: frozenset[str]  # those of which it leaves some entries, which are to be zero
    fills: tuple[Fill, ...]  # in this order, before the regions


def raw_name(module: str, parameter: str) -> str:
    """Return the name of a raw parameter in regions."""
    return f"{module}.{parameter}" if module else parameter


@torch.no_grad()
def record(
    model: torch.nn.Module, shapes: Mapping[str, Shape], precision: torch.dtype, complete: bool
) -> dict[str, ModuleUnit]:
    """Return the units of a vLLM model on this rank, by name, in the model's order; the model is left as it was.

    shapes: of every tensor on disk; precision: the policy's. complete: every parameter must be loaded (quantised models have
    some that are not). Raises ValueError if one is not, or was loaded in a way that this does not see.
    """
    modules = dict(model.named_modules())
    live = {name for name, _ in model.named_parameters()}  # without tied copies
    with _on_meta(modules):
        raw = {
            (module, raw_name(module, name)): tensor
            for module, layer in modules.items()
            for name, tensor in get_layer_tensors(layer).items()
        }
        before = {name for name, _ in model.named_parameters()}  # without those that processing made
        sources = {
            name: torch.empty(shape, dtype=served_dtype(name, precision), device="meta") for name, shape in shapes.items()
        }
        with Recorder(sources, raw) as recorder:
            loaded = model.load_weights(iter(sources.items()))
        check_loaded(loaded if complete else None, live & before, {name for name, _ in model.named_parameters()} - before)
        geometry = {key: (tuple(t.shape), tuple(t.stride()), t.dtype) for key, t in raw.items()}
    seen = {tensor for _, tensor in recorder.writes}
    if unseen := [
        n for n in (loaded or set()) & live & before if n not in seen and n.rpartition(".")[0] not in recorder.opaque
    ]:
        raise ValueError(f"vLLM loaded '{min(unseen)}' by other means than a copy into it, which is not recorded")
    for (module, tensor), writes in recorder.writes.items():
        if writes.entries > math.prod(geometry[module, tensor][0]):
            recorder.opaque[module] |= writes.names()
    return _units(modules, recorder, geometry, shapes)


def check_loaded(loaded: set[str] | None, wanted: set[str], made: set[str]) -> None:
    """loaded: the parameters that a vLLM loader says it has loaded; None: not known. made: those that it has made itself.

    Raises ValueError unless it loaded all that are wanted and made none: vLLM's reload would drop them.
    """
    if loaded is not None and (missed := wanted - loaded):
        raise ValueError(f"vLLM did not load {len(missed)} of its parameters, the first is '{min(missed)}'")
    if made:
        raise ValueError(f"vLLM makes '{min(made)}' only when it loads a checkpoint; such a model's weights cannot be replaced")


@contextmanager
def _on_meta(modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Within: every module has its raw parameters, on meta, with their original loaders."""
    placed: list[torch.nn.Module] = []
    stand_ins: dict[int, torch.Tensor] = {}
    try:
        for layer in modules.values():
            placed.append(layer)
            restore_raw_parameters(layer)
            for name, tensor in layer._parameters.items():
                # vLLM leaves biases where they are, and a router's, which two modules share. Buffers that stay are read.
                if tensor is not None and not tensor.is_meta:
                    layer._parameters[name] = stand_ins.setdefault(id(tensor), to_meta_tensor(tensor))
            unwrap_loaders(layer)
        yield
    finally:
        for layer in placed:
            restore_live_tensors(layer)


def restore_raw_parameters(layer: torch.nn.Module) -> None:
    """Give a module its raw parameters on meta, and remember its live tensors for `restore_live_tensors`."""
    info = get_layerwise_info(layer)
    if info.can_load() or info.kernel_tensors is not None:
        raise RuntimeError(f"{type(layer).__name__}: vLLM's reload of it has begun and not ended")
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)


def unwrap_loaders(layer: torch.nn.Module) -> None:
    """Undo what vLLM's reload does to a module's loaders, which it leaves so."""
    for tensor in get_layer_tensors(layer).values():
        while getattr(getattr(tensor, "weight_loader", None), "__name__", None) == "online_process_loader":
            tensor.weight_loader = tensor.weight_loader.__wrapped__


def restore_live_tensors(layer: torch.nn.Module) -> None:
    """Give a module that is between two states its live tensors again; others are left alone."""
    info = get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(layer, info)
    info.reset()


# ---- from what was recorded to units


def _units(
    modules: Mapping[str, torch.nn.Module],
    recorder: Recorder,
    geometry: Mapping[tuple[str, str], Geometry],
    shapes: Mapping[str, Shape],
) -> dict[str, ModuleUnit]:
    raw: dict[str, dict[str, Geometry]] = defaultdict(dict)
    for (module, tensor), where in geometry.items():
        raw[module][tensor] = where
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
    """{module: (the modules that must be loaded together with it, in the model's order; the tensors on disk they take)}."""
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
    """Tensors on disk, in the order of a checkpoint, each in memory of its own."""
    regions = []
    for name in shapes:
        if name in names:
            box = whole(shapes[name])
            regions.append(region(Piece(name, box, box), f"{module}:{name}", contiguous_strides(shapes[name])))
    return UpdateUnit(module, tuple(regions))
