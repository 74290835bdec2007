"""Read the GPU descriptions in `recipes/hardware/*.yaml`, from which plans estimate times and refits are planned.

`cluster.<component>.gpu` is the name of a description or a path to one. If a recipe does not set memory and network, the values
in the description apply. Its section `assumed` has the efficiencies that the plan assumes.

Not modelled: the network beyond the NIC; full bisection bandwidth is assumed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated

from omegaconf import OmegaConf
from pydantic import Field

from pipeline.config import config_tree, schema_validation
from pipeline.config.cluster import ComponentConfig
from pipeline.config.config_tree import ConfigValue
from pipeline.config.schema import Recipe
from pipeline.recipe.problems import Problem, RecipeError, collected, refuse
from pipeline.recipe.values import Bool, Float, Positive, Word

HARDWARE = Path(__file__).parents[2] / "recipes/hardware"
DEFAULT = "h100"
COMPONENTS = ("train", "generate", "reward", "judge")
HOPPER, BLACKWELL = 9, 10  # major numbers of compute capability: developer.nvidia.com/cuda-gpus


Speed = Annotated[Float, Field(gt=0)]
Fraction = Annotated[Float, Field(gt=0, le=1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Assumed:
    """Speeds that real programs reach; data sheets do not list them."""

    dense_training: Fraction  # of the peak FLOP/s in matrix products of a dense model
    mixture_training: Fraction  # the same for a mixture of experts
    bandwidth: Fraction  # of HBM bandwidth in decoding and in optimizers
    host: Fraction  # of the bandwidth of the link to the host in copies
    engine_step_ms: Speed  # overhead of an engine's step on top of the GPU's work
    all_reduce_us: Speed  # latency of a small all-reduce over NVLink
    page_locked: Fraction  # of the bandwidth of the link to the host in copies of page-locked memory, where turns change
    ipc_gb_per_s: Speed  # GB/s into a rank through memory that it maps (CUDA IPC)
    gloo_gb_per_s: Speed  # GB/s of a rank over gloo within a node, from host memory to host memory
    shortest_step: Speed = math.nan  # published seconds of a step / planned ones: the smallest quotient
    longest_step: Speed = math.nan  # and the largest; NaN: no published steps
    steps_on: Word | None = None  # the GPU that ran these steps; null: this one


@dataclasses.dataclass(frozen=True, slots=True)
class GPUSpec:
    """A GPU's data sheet. GB are 10^9 bytes; rates are in one direction."""

    name: str  # of the description's file
    memory_gb: Speed  # all that CUDA shows: more than the name of a GPU says, and less than nvidia-smi
    bf16_tflops: Speed  # dense
    fp8_tflops: Speed  # dense
    fp32_tflops: Speed
    hbm_gb_per_s: Speed
    nvlink_gb_per_s: Speed
    nvlink_gpus: Positive  # GPUs that NVLink connects with each other
    nic_gb_per_s: Speed
    host_gb_per_s: Speed
    compute_capability: Speed
    assumed: Assumed
    nvlink_crosses_nodes: Bool = False


@functools.cache
def gpu(name: str, key: str = "cluster.train.gpu") -> GPUSpec:
    """Return the description of a GPU. key: the recipe's key that names it. Raise RecipeError if it cannot be read."""
    path = config_tree.find_file(name, HARDWARE, key, ", or a path to a YAML file in that format")
    problems: list[Problem] = []
    with collected(problems):
        tree = config_tree.load_with_parents(path)
        tree.set("name", ConfigValue(path.stem))
        described, wrong = schema_validation.validate_tree(GPUSpec, tree)
        refuse([*schema_validation.unknown_keys(GPUSpec, tree), *wrong])
        return described
    raise RecipeError(
        *(Problem(key, problem.code, str(problem) if problem.origin else f"{path}: {problem}") for problem in problems)
    )


def of_device(name: str) -> str | None:
    """Return the name of the description of a GPU that CUDA calls `name`, such as h100; None if recipes/hardware has none."""
    described = sorted((file.stem for file in HARDWARE.glob("*.yaml")), key=len, reverse=True)  # gb200 before b200
    return next((each for each in described if each in name.lower()), None)


def assumptions() -> list[str]:
    """Return the names of the assumed values, without the range of published steps."""
    return [field.name for field in dataclasses.fields(Assumed) if field.default is dataclasses.MISSING]


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
