"""Replace the assumptions of recipes/hardware by the measurements of `make gpu-check` on a GPU: plan.hardware.

The measured GPU's name chooses its description, and the components of that GPU take the measurements:

    train: FSDP2, FSDP2 eager, Megatron-Core    `dense_training`: MFU of the backend that the policy uses, and of compiled or
                                                eager layers, without the optimizer's seconds, which the plan adds
    decode: vllm                                `engine_step_ms`: its seconds minus the seconds of the GPU's work
    offload                                     `page_locked`: the slower of both directions
    refit: shared GPU                           `ipc_gb_per_s`: all bytes into the GPU. `gloo_gb_per_s`: those into one of the
                                                two processes, without the copies to and from the host, which the plan adds
    machine                                     `memory_gb`: all that CUDA shows

All other values stay assumed. Parts that failed or were cut are skipped. A file is refused if it comes from a CPU, has another
format, or has none of these measurements. tests/gpu_check writes the file. A change of the file that this module must know
about changes FORMAT.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from launch.plan import generate_time
from launch.plan.lengths import Lengths
from launch.plan.rank_division import GIGA
from launch.plan.roofline import Rates
from launch.plan.train_time import OPTIMIZER_BYTES
from launch.recipes.model_files import planning_config
from pipeline import config
from pipeline.config import PRECISIONS, ComponentConfig, Problem, Recipe, RecipeError, compiles, hardware, uses_megatron
from pipeline.config.hardware import HARDWARE, GPUSpec
from pipeline.models import flops
from pipeline.models.shape import ModelShape
from pipeline.recipe import user_files

FORMAT = 1
"""The version of the file's format, as in tests/gpu_check/check.py."""
KEY = "plan.hardware"
RECEIVERS = 2  # processes on the GPU in `refit: shared GPU`, which get equally many bytes
TRAINED = 1_498_482_688
"""Number of parameters of the measured model of FORMAT (tests/gpu_check/sizes.py)."""
NUMBERS = {
    **dict.fromkeys(("train: FSDP2", "train: FSDP2 eager", "train: Megatron-Core"), ("MFU", "step, s")),
    "decode: vllm": ("s",),
    "offload": ("again to the host, GB/s", "again to the device, GB/s"),
    "refit: shared GPU": ("IPC GB/s", "host GB/s"),
}
"""Part -> the names of its numbers that are read."""
DECODE = "decode: vllm"
Positive = Annotated[PositiveFloat, Field(allow_inf_nan=False)]


class _Machine(BaseModel):
    gpus: list[str] = Field(min_length=1)
    memory_gb: list[Positive] = Field(min_length=1)


class _Result(BaseModel):
    part: str
    outcome: Literal["passed", "failed", "cut", "left out"]
    numbers: dict[str, Any] = {}
    details: dict[str, Any] = {}


class _CheckFile(BaseModel):
    format: Literal[1]
    device: Literal["cuda"]
    size: Literal["full"]
    date: str
    machine: _Machine
    results: list[_Result]


class _Decoded(BaseModel):
    """The model and the requests that the part `decode: vllm` measured."""

    model: dict[str, Any]
    requests: PositiveInt
    prompt: Positive  # tokens
    answer: Positive  # tokens


@dataclass(frozen=True, slots=True)
class GPUCheck:
    """The measurements of one file."""

    path: Path
    date: str
    gpu: str  # the name of its description in recipes/hardware
    memory_gb: float  # of the GPU with the least
    numbers: Mapping[str, Mapping[str, float]]  # by part and name, of parts that passed
    rates: Mapping[str, float]  # by part that trains: the share of the peak that matrix products reach
    decoded: _Decoded | None
    shape: ModelShape | None  # of the decoded model


@dataclass(frozen=True, slots=True)
class Value:
    """A measured value in place of an assumed one."""

    field: str  # of hardware.Assumed
    value: float
    part: str


# ---- the file -----------------------------------------------------------------------------------------------------------


def read(path: str) -> GPUCheck:
    """Return the measurements of a file. Raises RecipeError."""
    try:
        modified_ns = os.stat(path).st_mtime_ns
    except (OSError, ValueError) as error:
        raise _refusal(path, f"an unreadable file ({error})", "the file that make gpu-check writes", "file-not-found") from None
    return _read(path, modified_ns)


@functools.lru_cache(maxsize=8)
def _read(path: str, _changed: int) -> GPUCheck:
    try:
        record = _CheckFile.model_validate_json(user_files.read_text(path, user_files.MAX_JSON))
        passed = {r.part: r for r in record.results if r.part in NUMBERS and r.outcome == "passed"}
        numbers = {part: _numbers(result) for part, result in passed.items()}
        decoded = _Decoded.model_validate(passed[DECODE].details) if DECODE in passed else None
        shape = ModelShape.of(decoded.model, KEY) if decoded else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _refusal(path, f"{where}: {repr(first['input'])[:80]}", first["msg"][0].lower() + first["msg"][1:]) from None
    except RecipeError:
        raise _refusal(path, f"{DECODE}: a model that cannot be planned", "the config.json of a model") from None
    except (OSError, ValueError) as error:
        raise _refusal(path, f"a file that cannot be read ({error})", "the file that make gpu-check writes") from None
    if not numbers:
        raise _refusal(path, "no measurement that a plan uses", f"at least one of {', '.join(NUMBERS)}")
    gpu = _described(path, record.machine)
    rates = {part: _rate(path, part, of, hardware.gpu(gpu)) for part, of in numbers.items() if "MFU" in of}
    memory_gb = min(record.machine.memory_gb)
    return GPUCheck(Path(path), record.date, gpu, memory_gb, numbers, rates, decoded, shape)


def _numbers(result: _Result) -> dict[str, float]:
    """Return the numbers of a part that a plan reads. Raises ValidationError."""
    chosen = {name: result.numbers.get(name) for name in NUMBERS[result.part]}
    return TypeAdapter(dict[str, Positive]).validate_python(chosen)


def _described(path: str, machine: _Machine) -> str:
    """Return the name of the GPUs' description in recipes/hardware. Raises RecipeError."""
    if len(kinds := set(machine.gpus)) == 1 and (gpu := hardware.of_device(machine.gpus[0])):
        return gpu
    names = ", ".join(sorted(file.stem for file in HARDWARE.glob("*.yaml")))
    raise _refusal(path, f"machine.gpus {sorted(kinds)}", f"GPUs of one kind of recipes/hardware: {names}")


def _rate(path: str, part: str, numbers: Mapping[str, float], spec: GPUSpec) -> float:
    """Return the share of the peak rate of matrix products with which a plan of the measured step takes the measured seconds.

    The measured MFU refers to the whole step. A plan adds the optimizer's seconds to those of the matrix products, so they are
    subtracted from the step first. Raises RecipeError if the share is above 1.
    """
    spent, optimizer = numbers["step, s"], TRAINED * OPTIMIZER_BYTES / (GIGA * spec.hbm_gb_per_s * spec.assumed.bandwidth)
    rate = numbers["MFU"] * spent / (spent - optimizer) if spent > optimizer else math.inf
    if rate > 1:
        expected = f"an MFU that leaves {optimizer:.2g} s of the step to the optimizer"
        raise _refusal(path, f"{part}: step, s {spent:.3g} with MFU {numbers['MFU']:.3g}", expected)
    return rate


def _refusal(path: str, got: str, expected: str, code: str = "bad-format") -> RecipeError:
    again = 'Try make gpu-check ARGS="out=FILE" on the GPU to measure'
    return RecipeError(Problem(KEY, code, f"got {path}: {got}; expected {expected}. {again}"))


# ---- what it changes ----------------------------------------------------------------------------------------------------


def of_recipe(recipe: Recipe) -> GPUCheck | None:
    """Return the measurements in the file plan.hardware; None if that is null.

    Raises RecipeError if no component has the measured GPU.
    """
    if recipe.plan.hardware is None:
        return None
    check = read(recipe.plan.hardware)
    components = {name: on.gpu for name, on in config.components(recipe).items() if on.gpus_per_node}
    if components and check.gpu not in components.values():
        named = " ".join(f"cluster.{name}.gpu={gpu}" for name, gpu in components.items())
        change = " ".join(f"cluster.{name}.gpu={check.gpu}" for name in components)
        message = f"got {check.path} with measurements of {check.gpu}; expected a GPU of {named}. Try {change}"
        raise RecipeError(Problem(KEY, "contradiction", message))
    return check


def with_measured_memory(recipe: Recipe) -> Recipe:
    """Return the recipe with the measured memory as gpu_memory_gb of components that have the measured GPU and set none.

    Raises RecipeError.
    """
    check = of_recipe(recipe)
    if check is None:
        return recipe
    components = config.components(recipe)
    components_with_memory: dict[str, Any] = {
        name: replace(on, gpu_memory_gb=check.memory_gb)
        for name, on in components.items()
        if on.gpu == check.gpu and on.gpus_per_node and on.gpu_memory_gb is None
    }
    return replace(recipe, cluster=replace(recipe.cluster, **components_with_memory))


def gpu(recipe: Recipe, component: ComponentConfig) -> GPUSpec:
    """Return the GPU of a component, with its measured values in place of assumed ones."""
    spec = hardware.gpu(component.gpu)
    numbers = {value.field: value.value for value in values(recipe, component)}
    return replace(spec, assumed=replace(spec.assumed, **numbers)) if numbers else spec


def values(recipe: Recipe, component: ComponentConfig) -> list[Value]:
    """Return the measured values of a component's GPU; none if another GPU was measured."""
    check = of_recipe(recipe)
    if check is None or check.gpu != component.gpu:
        return []
    return list(_values(recipe, check, hardware.gpu(component.gpu)))


def _values(recipe: Recipe, check: GPUCheck, spec: GPUSpec) -> Iterator[Value]:
    numbers, part = check.numbers, _train_part(recipe)
    rate = spec.assumed.dense_training
    if part in check.rates and PRECISIONS[recipe.policy.precision] == 2:
        rate = check.rates[part]
        yield Value("dense_training", rate, part)
    if check.decoded and check.shape and recipe.policy.generation.backend == "vllm":
        yield Value("engine_step_ms", _overhead(check.decoded, check.shape, numbers[DECODE]["s"], spec, rate), DECODE)
    copies = spec.assumed.page_locked * spec.host_gb_per_s
    if "offload" in numbers:
        copies = min(numbers["offload"].values())
        yield Value("page_locked", copies / spec.host_gb_per_s, "offload")
    if (name := "refit: shared GPU") in numbers:
        yield Value("ipc_gb_per_s", numbers[name]["IPC GB/s"], name)
        wire_s = (
            1 / numbers[name]["host GB/s"] - 2 / copies
        )  # seconds of a GB over gloo, beside its copies to and from the host
        if wire_s > 0:
            yield Value("gloo_gb_per_s", 1 / wire_s / RECEIVERS, name)


def _train_part(recipe: Recipe) -> str:
    """Return the part of the check that measures the policy's train backend, with compiled or eager layers as in the recipe."""
    if uses_megatron(recipe.policy):
        return "train: Megatron-Core"
    return "train: FSDP2" if compiles(recipe.policy, _mixture(recipe)) else "train: FSDP2 eager"


def _mixture(recipe: Recipe) -> bool:
    """Return whether the policy's model is a mixture of experts; False if a run has yet to write the model."""
    try:
        model = planning_config(recipe.policy)
        return model is not None and ModelShape.of(model).mixture
    except RecipeError:
        return False


def _overhead(decoded: _Decoded, shape: ModelShape, measured: float, spec: GPUSpec, rate: float) -> float:
    """Return the milliseconds by which the engine's measured step is longer than the estimated work of the GPU, at least 0.

    measured: seconds of the whole part. rate: the share of the peak that matrix products reach.
    """
    spec = replace(spec, assumed=replace(spec.assumed, engine_step_ms=0.0, dense_training=rate))
    engine = generate_time.Engine(shape, Rates(spec, spec.nic_gb_per_s, 1, mixture=shape.experts > 0), 1, 1)
    lengths = Lengths(decoded.prompt, decoded.answer, decoded.answer, "")
    requests = decoded.requests
    work = sum(generate_time.decoding(engine, requests, requests, lengths, requests).values())
    work += flops.forward(shape, requests * decoded.prompt, requests * decoded.prompt**2 / 2) / engine.rates.flops
    return max(0.0, measured - work) / decoded.answer * 1e3


# ---- the report ---------------------------------------------------------------------------------------------------------


def describe(recipe: Recipe, component: ComponentConfig) -> str:
    """Return a text with the measured values of a component's GPU and the names of those that are still assumed.

    Return "" if the component's GPU is not the measured one.
    """
    check = of_recipe(recipe)
    if check is None or check.gpu != component.gpu:
        return ""
    measured = values(recipe, component)
    texts = [f"{value.field} {value.value:.3g} ({value.part})" for value in measured]
    texts.append(f"{check.memory_gb:g} GB (machine)")
    assumed = [name for name in hardware.assumptions() if name not in {value.field for value in measured}]
    source = f"{check.gpu} by {check.path} of {check.date}, with small models"
    return f"{source}: {'; '.join(texts)}. Still assumed: {', '.join(assumed)}"
