"""Count the GPUs of this machine without torch, for the local executor."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Problem, RecipeError

SMI_S = 20.0
"""Time limit of nvidia-smi: it takes some seconds without a persistence daemon, and hangs with a stuck driver."""
OTHER_DRIVERS = ("/dev/dxg", "/dev/kfd")
"""Devices of WSL and of AMD, whose GPUs cannot be counted here."""


def count() -> tuple[int | None, str]:
    """Return (number of GPUs, source of the number). The number is None if it is unknown.

    The source is `nvidia-smi`, which respects a container's limits. If it is missing or fails, the devices /dev/nvidia0,
    /dev/nvidia1 ... are counted instead.
    """
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_S)
        if answer.returncode == 0:
            return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()), "nvidia-smi"
    except (OSError, subprocess.TimeoutExpired):
        pass  # count the devices in /dev
    devices = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    if not devices and any(Path(path).exists() for path in OTHER_DRIVERS):
        return None, ""
    return devices, "/dev/nvidia*"


def usable() -> tuple[list[str], str]:
    """Return (names of the GPUs that our processes may use, source of the names). CUDA_VISIBLE_DEVICES takes the same names.

    The list is empty if the number of GPUs is unknown and CUDA_VISIBLE_DEVICES is unset. CUDA ignores the first GPU in
    CUDA_VISIBLE_DEVICES that does not exist and all after it; the list omits these too.
    """
    there, source = count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(there or 0)], source
    return _visible_devices(visible, there), f"{source or 'an unknown driver'} and CUDA_VISIBLE_DEVICES={visible}"


def assign(requested: int, keys: Sequence[str]) -> list[str]:
    """Return the names, for CUDA_VISIBLE_DEVICES, of the first `requested` GPUs that our processes may use.

    keys: the recipe's keys that request GPUs. Raises RecipeError, which names these keys, if this machine has fewer GPUs.
    """
    if not requested:
        return []
    devices, source = usable()
    if not source:  # unknown, so the recipe is trusted
        devices = [str(i) for i in range(requested)]
    if len(devices) < requested:
        why = (
            f"got {requested} GPUs in all ({' + '.join(keys)}, times nodes); expected at most {len(devices)},"
            f" the GPUs of this machine according to {source}. Try fewer (0 runs on CPUs), or cluster.executor=slurm"
        )
        raise RecipeError(Problem(keys[0], "too-large", why))
    return devices[:requested]


def _visible_devices(visible: str, there: int | None) -> list[str]:
    devices = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or there == 0 or (re.fullmatch(r"-?\d+", name) and not 0 <= int(name) < (there or 1 << 16)):
            break
        devices.append(name)
    return devices
