"""GPUs as `recipes/hardware/*.yaml` describe them: what the plan prices with, and the network that a refit is planned for.

`cluster.<component>.gpu` names a description, or is the path of one. Memory and network that a recipe leaves open are that
GPU's. What efficiency is assumed stands in the description too, under `assumed`.

Left out: what a network does beyond the NIC; full bisection is assumed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from pipeline.config import layers
from pipeline.config.cluster import ComponentConfig
from pipeline.config.errors import RecipeError
from pipeline.config.schema import Recipe

HARDWARE = Path(__file__).parents[2] / "recipes/hardware"
DEFAULT = "h100"
CROSSES = "nvlink_crosses_nodes"  # false where a description does not say
COMPONENTS = ("train", "generate", "reward")
HOPPER, BLACKWELL = 9, 10  # major numbers of compute capability: developer.nvidia.com/cuda-gpus


@dataclasses.dataclass(frozen=True, slots=True)
class Assumed:
    """What real programs attain. None of it is on a data sheet."""

    dense_training: float  # of the peak FLOP/s, by matrix products of a model without experts
    mixture_training: float  # the same of a mixture of experts
    bandwidth: float  # of HBM's, in decoding and by optimizers
    host: float  # of the link to the host, by copies
    engine_step_ms: float  # of an engine's step, beside the GPU's work
    all_reduce_us: float  # of a small all-reduce among GPUs that share NVLink


@dataclasses.dataclass(frozen=True, slots=True)
class GPU:
    """Of one GPU. GB are 10^9 bytes; rates are one way."""

    name: str
    memory_gb: float
    bf16_tflops: float  # dense
    fp8_tflops: float  # dense
    fp32_tflops: float
    hbm_gb_per_s: float
    nvlink_gb_per_s: float
    nvlink_gpus: int  # how many reach each other by NVLink
    nic_gb_per_s: float
    host_gb_per_s: float
    compute_capability: float
    assumed: Assumed
    nvlink_crosses_nodes: bool = False


@functools.cache
def gpu(name: str, key: str = "cluster.train.gpu") -> GPU:
    """The description that `name` stands for. key: where the recipe says so. Raises RecipeError."""
    path = _find(name, key)
    try:
        described = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(f"{key}: {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(described, dict):
        raise RecipeError(f"{key}: {path} is not a mapping of keys, as {HARDWARE / DEFAULT}.yaml is")
    assumed = described.pop("assumed", None)
    if not isinstance(assumed, dict):
        raise RecipeError(f"{key}: {path} has no mapping 'assumed', as {HARDWARE / DEFAULT}.yaml has")
    problems = [*_wrong(described, GPU, key, path, ""), *_wrong(assumed, Assumed, key, path, "assumed.")]
    if problems:
        raise RecipeError(*problems)
    numbers = {name: value if name in ("nvlink_gpus", CROSSES) else float(value) for name, value in described.items()}
    return GPU(name=path.stem, **numbers, assumed=Assumed(**{name: float(value) for name, value in assumed.items()}))


def _find(name: str, key: str) -> Path:
    return layers.named(name, HARDWARE, f"{key}: '{name}' is no described GPU", ", or a path to a YAML like those")


def _wrong(given: dict[Any, Any], kind: type, key: str, path: Path, prefix: str) -> Iterator[str]:
    wanted = {field.name: field.type for field in dataclasses.fields(kind) if field.name not in ("name", "assumed")}
    if missing := [f"{prefix}{name}" for name in wanted if name not in given and name != CROSSES]:
        yield f"{key}: {path} lacks {', '.join(missing)}"
    if unknown := [f"{prefix}{name}" for name in given if name not in wanted]:
        yield f"{key}: {path} has unknown keys: {', '.join(unknown)}; there are: {', '.join(wanted)}"
    for name, value in given.items():
        if name in wanted and name == CROSSES:
            if not isinstance(value, bool):
                yield f"{key}: {path}: {name} is {value!r}; true or false"
        elif name in wanted and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")):
            yield f"{key}: {path}: {prefix}{name} is {value!r}; a number above 0"
        elif wanted.get(name) == "int" and not isinstance(value, int):
            yield f"{key}: {path}: {prefix}{name} is {value!r}; a whole number"
        elif kind is Assumed and name in wanted and name.endswith(("training", "bandwidth", "host")) and value > 1:
            yield f"{key}: {path}: {prefix}{name} is {value!r}; a fraction, at most 1"


def problems(recipe: Recipe) -> Iterator[str]:
    """What is wrong with the descriptions that a recipe names."""
    for component in COMPONENTS:
        try:
            gpu(getattr(recipe.cluster, component).gpu, f"cluster.{component}.gpu")
        except RecipeError as error:
            yield from error.problems


def memory_gb(component: ComponentConfig) -> float:
    """Of one GPU of a component, in units of 10^9 bytes."""
    return gpu(component.gpu).memory_gb if component.gpu_memory_gb is None else component.gpu_memory_gb


def nvlink_gpus(component: ComponentConfig) -> int:
    """How many of a component's ranks, counted node by node, reach each other by NVLink."""
    described, own = gpu(component.gpu), component.ranks_per_node or component.gpus_per_node
    return described.nvlink_gpus if described.nvlink_crosses_nodes else min(described.nvlink_gpus, own)


def described(name: str, key: str) -> float:
    """Return a number of a GPU's description, which `${hardware:name,key}` stands for in a recipe.

    Of a description that cannot be read return the default's: `problems` tells of that.
    """
    try:
        return getattr(gpu(name), key)
    except RecipeError:
        return getattr(gpu(DEFAULT), key)


_register = getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)  # renamed in OmegaConf 2.4
_register("hardware", described, replace=True)
