"""Describe this machine: GPUs, driver, compiler, versions, and how long imports take."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import resource
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.node import c_compiler
from tests.gpu_check.measurement import Measurement, Place

PACKAGES = ("torch", "vllm", "megatron", "transformer_engine", "transformers", "triton")
IMPORTS = ("transformers", "pipeline.train.fsdp", "pipeline.train.megatron.megatron_backend")
SMI_S = 20.0
FIELDS = (
    "driver_version",
    "memory.total",
    "memory.used",
    "compute_mode",
    "mig.mode.current",
    "persistence_mode",
    "power.limit",
    "clocks.max.sm",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
"""Fields that `nvidia-smi --help-query-gpu` explains."""


def describe(place: Place) -> Measurement:
    """Return a description of this machine. Problems: what PyTorch's compiler lacks."""
    start = time.perf_counter()
    import torch.cuda.nccl

    measured = Measurement({"import torch, s": time.perf_counter() - start})
    gpus = range(torch.cuda.device_count()) if place.device == "cuda" else ()
    lacking = c_compiler.missing()
    measured.details = {
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "memory_gb": [torch.cuda.mem_get_info(i)[1] / 1e9 for i in gpus],  # all that CUDA shows
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "NCCL": list(torch.cuda.nccl.version()) if gpus else None,
        "torch_build": f"{torch.__version__} ({torch.version.git_version})",
        "versions": versions(),
        "lacking": lacking,
        "varlen_attn": _varlen_arguments(),
        "nvidia-smi": _nvidia_smi() if gpus else None,
        "host": _host(),
    }
    if place.device == "cuda" and not gpus:
        return measured  # the check ends
    imports = measured.details["import"] = {name: _import(name) for name in IMPORTS}
    if gpus and lacking:
        measured.problems.append(f"there is no {lacking}, which Triton needs")
    measured.numbers |= {f"import {name}, s": seconds for name, seconds in imports.items() if isinstance(seconds, float)}
    measured.note = "; ".join(f"{name}: {error}" for name, error in imports.items() if isinstance(error, str))
    return measured


def versions() -> dict[str, str | None]:
    """Return the versions of these packages. None: not installed."""
    owners = metadata.packages_distributions()
    return {module: metadata.version(owners[module][0]) if module in owners else None for module in PACKAGES}


def _import(module: str) -> float | str:
    """Return the seconds of a module's import, or its error."""
    start = time.perf_counter()
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return round(time.perf_counter() - start, 2)


def _varlen_arguments() -> dict[str, list[str]] | str:
    """Return the arguments of torch's variable-length attention, which differ between releases."""
    import torch

    try:
        from torch.nn.attention.varlen import varlen_attn

        private = torch.ops.torch_attn._varlen_attn.default._schema.arguments
        return {
            "varlen_attn": [*inspect.signature(varlen_attn).parameters],
            "_varlen_attn": [argument.name for argument in private],
        }
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _nvidia_smi() -> list[dict[str, str]] | str:
    """Return the fields of each GPU, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if answer.returncode:
        return (answer.stdout + answer.stderr).strip()
    return [dict(zip(FIELDS, line.split(", "), strict=False)) for line in answer.stdout.splitlines()]


def _host() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "shm_gb": round(shutil.disk_usage("/dev/shm").free / 1e9, 1) if Path("/dev/shm").exists() else 0.0,
        "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],  # bytes; -1: none
    }
