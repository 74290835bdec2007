"""Read the GPU descriptions in `recipes/hardware/*.yaml`, from which plans estimate times and refits are planned.

`cluster.<component>.gpu` is the name of a description or a path to one. If a recipe does not set memory and network, the values
in the description apply. Its section `assumed` has the efficiencies that the plan assumes.

Not modelled: the network beyond the NIC; full bisection bandwidth is assumed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from pipeline.config import config_tree
from pipeline.config.cluster import ComponentConfig
from pipeline.config.schema import Recipe
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError, collected, refuse

HARDWARE = Path(__file__).parents[2] / "recipes/hardware"
DEFAULT = "h100"
CROSSES = "nvlink_crosses_nodes"  # false by default
OPTIONAL = (CROSSES, "shortest_step", "longest_step")
COMPONENTS = ("train", "generate", "reward")
HOPPER, BLACKWELL = 9, 10  # major numbers of compute capability: developer.nvidia.com/cuda-gpus


@dataclasses.dataclass(frozen=True, slots=True)
class Assumed:
    """Speeds that real programs reach; data sheets do not list them."""

    dense_training: float  # fraction of the peak FLOP/s in matrix products of a dense model
    mixture_training: float  # the same for a mixture of experts
    bandwidth: float  # fraction of HBM bandwidth in decoding and in optimizers
    host: float  # fraction of the bandwidth of the link to the host in copies
    engine_step_ms: float  # overhead of an engine's step on top of the GPU's work
    all_reduce_us: float  # latency of a small all-reduce over NVLink
    page_locked: float  # fraction of the bandwidth of the link to the host in copies of page-locked memory, where turns change
    ipc_gb_per_s: float  # GB/s into a rank through memory that it maps (CUDA IPC)
    gloo_gb_per_s: float  # GB/s of a rank over gloo within a node, from host memory to host memory
    shortest_step: float = math.nan  # published seconds of a step / planned ones: the smallest quotient
    longest_step: float = math.nan  # and the largest; NaN: no published steps


@dataclasses.dataclass(frozen=True, slots=True)
class GPUSpec:
    """A GPU's data sheet. GB are 10^9 bytes; rates are in one direction."""

    name: str
    memory_gb: float  # all that CUDA shows: more than the name of a GPU says, and less than nvidia-smi
    bf16_tflops: float  # dense
    fp8_tflops: float  # dense
    fp32_tflops: float
    hbm_gb_per_s: float
    nvlink_gb_per_s: float
    nvlink_gpus: int  # GPUs that NVLink connects with each other
    nic_gb_per_s: float
    host_gb_per_s: float
    compute_capability: float
    assumed: Assumed
    nvlink_crosses_nodes: bool = False


@functools.cache
def gpu(name: str, key: str = "cluster.train.gpu") -> GPUSpec:
    """Return the description of a GPU. key: the recipe's key that names it. Raise RecipeError if it cannot be read."""
    path = config_tree.find_file(name, HARDWARE, key, ", or a path to a YAML file in that format")
    try:
        described = yaml.safe_load(user_files.read_text(path, config_tree.MAX_YAML))
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(Problem(key, "unreadable", f"cannot read {path}: {' '.join(str(error).split())}")) from None
    assumed = described.pop("assumed", None) if isinstance(described, dict) else None
    if not isinstance(assumed, dict):
        message = f"got {path}; expected a mapping of keys with a mapping `assumed`, as in {HARDWARE / DEFAULT}.yaml"
        raise RecipeError(Problem(key, "bad-format", message))
    faults = [*_wrong(described, GPUSpec, ""), *_wrong(assumed, Assumed, "assumed.")]
    refuse(Problem(key, code, f"{path}: {message}") for code, message in faults)
    numbers: dict[str, Any] = {
        name: value if name in ("nvlink_gpus", CROSSES) else float(value) for name, value in described.items()
    }
    return GPUSpec(name=path.stem, **numbers, assumed=Assumed(**{name: float(value) for name, value in assumed.items()}))


def of_device(name: str) -> str | None:
    """Return the name of the description of a GPU that CUDA calls `name`, such as h100; None if recipes/hardware has none."""
    described = sorted((file.stem for file in HARDWARE.glob("*.yaml")), key=len, reverse=True)  # gb200 before b200
    return next((each for each in described if each in name.lower()), None)


def _wrong(given: dict[Any, Any], kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (code, message) for each problem of a description. prefix: the text before its keys in messages."""
    wanted = {field.name: field.type for field in dataclasses.fields(kind) if field.name not in ("name", "assumed")}
    if missing := [f"{prefix}{name}" for name in wanted if name not in given and name not in OPTIONAL]:
        yield "missing-value", f"lacks {', '.join(missing)}"
    if unknown := [f"{prefix}{name}" for name in given if name not in wanted]:
        yield "unknown-key", f"has unknown keys: {', '.join(unknown)}; expected some of: {', '.join(wanted)}"
    for name, value in given.items():
        fraction = kind is Assumed and str(name).endswith(("training", "bandwidth", "host", "page_locked"))
        if name not in wanted:
            continue
        if name == CROSSES:
            wrong = None if isinstance(value, bool) else ("wrong-type", "true or false")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            wrong = "wrong-type", "a number above 0"
        elif wanted[name] == "int" and not isinstance(value, int):
            wrong = "wrong-type", "a whole number"
        else:
            wrong = ("too-large", "a fraction, at most 1") if fraction and value > 1 else None
        if wrong:
            yield wrong[0], f"got {prefix}{name}: {value!r}; expected {wrong[1]}"


def assumptions() -> list[str]:
    """Return the names of the assumed values, without the range of published steps."""
    return [field.name for field in dataclasses.fields(Assumed) if field.name not in OPTIONAL]


def problems(recipe: Recipe) -> list[Problem]:
    """Return the problems of the GPU descriptions that a recipe names."""
    found: list[Problem] = []
    for component in COMPONENTS:
        with collected(found):
            gpu(getattr(recipe.cluster, component).gpu, f"cluster.{component}.gpu")
    return found


def memory_gb(component: ComponentConfig) -> float:
    """Return the memory of one GPU of a component, in units of 10^9 bytes."""
    return gpu(component.gpu).memory_gb if component.gpu_memory_gb is None else component.gpu_memory_gb


def nvlink_gpus(component: ComponentConfig) -> int:
    """Return the largest number of consecutive ranks that share an NVLink domain. The component may have fewer ranks."""
    described, own = gpu(component.gpu), component.ranks_per_node or component.gpus_per_node
    return described.nvlink_gpus if described.nvlink_crosses_nodes else min(described.nvlink_gpus, own)


def gpu_value(name: object, key: str) -> float:
    """Return a number of a GPU's description, such as hbm_gb_per_s. It resolves `${hardware:name,key}` in recipes.

    name: the recipe's value, of any type. If the GPU's file cannot be read, return the default GPU's number; `problems` or the
    schema reports the error.
    """
    try:
        return getattr(gpu(str(name)), key)
    except RecipeError:
        return getattr(gpu(DEFAULT), key)


_register = getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)  # renamed in OmegaConf 2.4
_register("hardware", gpu_value, replace=True)
