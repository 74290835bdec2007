"""The parts of the check, in their order: what each needs, how long it takes, and how it is run."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_check import areas, runs
from tests.gpu_check.measurement import Place
from tests.gpu_check.table import Result

TORCH = ("torch", "numpy")
"""Without these nothing runs."""
MACHINE = "machine"
"""The first part, which tells how many GPUs there are."""
PACKAGES = {"megatron.core": "megatron-core", "yaml": "pyyaml"}


@dataclass(frozen=True)
class Part:
    name: str
    seconds: tuple[float, float]  # on a warm H100 at full size; on two CPU cores at tiny size
    needs: tuple[str, ...]  # modules
    call: tuple[str, ...] = ()  # (module of this package, function, arguments): the worker calls it
    command: Callable[[], list[str]] | None = None  # or the part has a program of its own
    judge: Callable[[str, int, str], Result] | None = None  # of the program: (name, status, output) -> result
    run_dir: Path | None = None  # of a run
    gpus: int = 1  # that it needs
    alone: bool = False  # in a worker of its own

    def expected(self, place: Place) -> float:
        """Return about how many seconds it takes here."""
        return self.seconds[place.device == "cpu"]


# ---- what is installed ------------------------------------------------------------------------------------------------------


def missing(*modules: str) -> list[str]:
    """Return the packages that are not installed. Nothing is imported but the packages above them."""
    return [PACKAGES.get(name, name) for name in modules if not _there(name)]


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


PIPELINE = (*TORCH, "yaml", "omegaconf", "pydantic", "pydantic_core", "annotated_types", "typing_inspection")
PIPELINE += ("typing_extensions", "msgspec", "psutil")
"""Modules that every part but the first imports."""
MODELS = (*PIPELINE, "transformers", "safetensors")
RECIPES = (*MODELS, "antlr4", "jinja2")  # of parts that read a recipe and build its roles
MEGATRON = ("megatron.core",)
SUBMIT = (*RECIPES, "submitit", "cloudpickle")
RUNS = (*SUBMIT, "datasets", "dill", "multiprocess", "pyarrow", "pandas", "xxhash", "torchdata", "tensorboard", "rich")


# ---- the parts --------------------------------------------------------------------------------------------------------------


def every(place: Place) -> list[Part]:
    """Return all parts, the most telling first. All seconds are estimates until they have been measured on an H100."""
    vllm = not missing("vllm")
    decoder = ("vllm",) if vllm else ()
    return [
        Part(MACHINE, (12, 20), TORCH, ("machine", "describe")),
        Part("attention", (60, 5), MODELS, ("attention", "check")),
        Part("world", (20, 15), PIPELINE, ("worlds", "check")),
        Part("families: FSDP2", (20, 5), MODELS, ("families", "fsdp2")),
        Part("train: FSDP2 eager", (35, 5), RECIPES, ("training", "step", "FSDP2 eager")),
        Part("train: FSDP2", (100, 100), RECIPES, ("training", "step", "FSDP2")),
        Part("refit: shared GPU", (75, 20), MODELS, ("refit", "shared")),
        Part("refit: a GPU each", (45, 20), MODELS, ("refit", "apart"), gpus=4),
        _tests("vLLM", (240, 60), (*MODELS, "vllm"), place),
        Part("decode: vllm", (90, 60), (*RECIPES, "vllm"), ("decoding", "decode", "vllm"), alone=True),
        Part("offload", (15, 3), PIPELINE, ("host_memory", "offload")),
        Part("reference", (20, 3), RECIPES, ("host_memory", "reference")),
        Part("families: Megatron-Core", (20, 10), (*MODELS, *MEGATRON), ("families", "megatron")),
        Part("train: Megatron-Core", (35, 5), (*RECIPES, *MEGATRON), ("training", "step", "Megatron-Core")),
        Part("train: FSDP2 on all GPUs", (90, 60), RECIPES, ("training", "on_all_gpus", "FSDP2"), gpus=2),
        Part("norms: two ranks", (40, 25), (*MODELS, *MEGATRON), ("norms", "two_ranks"), gpus=2),
        _run(runs.SFT, (60, 30), RUNS, place, vllm),
        _run(runs.SHARED, (75, 30), (*RUNS, *decoder), place, vllm),
        _run(runs.APART, (75, 40), (*RUNS, *decoder), place, vllm, gpus=4),
        _tests("compiled bfloat16", (70, 15), MODELS, place),
        Part("repeats", (30, 5), RECIPES, ("repeats", "training"), alone=True),
        Part("norms: one rank", (15, 5), (*MODELS, *MEGATRON), ("norms", "one_rank")),
        _tests("memory", (70, 15), (*SUBMIT, *MEGATRON), place),
        _tests("refit", (90, 15), MODELS, place),
        _tests("node and monitor", (20, 15), (*PIPELINE, "safetensors", "tokenizers"), place),
        _tests("FSDP2", (70, 15), (*SUBMIT, "peft"), place),
        _tests("Megatron-Core", (50, 15), (*MODELS, *MEGATRON), place),
        _tests("compiled float32", (60, 15), MODELS, place),
        Part("decode: transformers", (45, 10), RECIPES, ("decoding", "decode", "transformers")),
    ]


def _tests(name: str, seconds: tuple[float, float], needs: tuple[str, ...], place: Place) -> Part:
    timeout = not missing("pytest_timeout")
    command = functools.partial(areas.command, areas.AREAS[name], place, timeout)
    judge = functools.partial(areas.judge, place=place)
    return Part(f"tests: {name}", seconds, ("pytest", *needs), command=command, judge=judge)


def _run(name: str, seconds: tuple[float, float], needs: tuple[str, ...], place: Place, vllm: bool, gpus: int = 1) -> Part:
    command, folder = functools.partial(runs.command, name, place, vllm), runs.folder(name, place)
    judge = functools.partial(runs.judge, run=folder)
    return Part(f"run: {name}", seconds, needs, command=command, judge=judge, run_dir=folder, gpus=gpus)
