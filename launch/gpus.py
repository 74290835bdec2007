"""The GPUs of this machine, counted without torch: the one place that the local executor asks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Problem, RecipeError

SMI_S = 20.0
"""How long nvidia-smi may take: some seconds where no persistence daemon runs. A driver that is stuck never answers."""
OTHER_DRIVERS = ("/dev/dxg", "/dev/kfd")
"""Devices of WSL and of AMD: GPUs that nothing here can count."""


def count() -> tuple[int | None, str]:
    """Return the number of GPUs, None where nobody can tell, and who says so.

    Asks `nvidia-smi`, which knows of a container's limits. Where it is missing or fails, counts /dev/nvidia0, /dev/nvidia1 ...
    """
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_S)
        if answer.returncode == 0:
            return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()), "nvidia-smi"
    except (OSError, subprocess.TimeoutExpired):
        pass  # /dev tells it too
    devices = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    if not devices and any(Path(path).exists() for path in OTHER_DRIVERS):
        return None, ""
    return devices, "/dev/nvidia*"


def usable() -> tuple[list[str], str]:
    """Return the GPUs that a process of ours may use, as CUDA_VISIBLE_DEVICES names them, and who says so.

    The list is empty where nobody can tell and CUDA_VISIBLE_DEVICES is not set. As CUDA reads it, that variable ends where it
    names a GPU that is not there.
    """
    there, source = count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(there or 0)], source
    return _shown(visible, there), f"{source or 'an unknown driver'} and CUDA_VISIBLE_DEVICES={visible}"


def assigned(asked: int, keys: Sequence[str]) -> list[str]:
    """Return the first `asked` GPUs that a process of ours may use, as CUDA_VISIBLE_DEVICES names them.

    Raises RecipeError, naming the keys that ask for them, if this machine has fewer.
    """
    if not asked:
        return []
    devices, source = usable()
    if not source:  # nobody can tell
        devices = [str(i) for i in range(asked)]
    if len(devices) < asked:
        told = (
            f"got {asked} GPUs in all ({' + '.join(keys)}, times nodes); expected at most {len(devices)}, which this machine"
            f" has by {source}. Try fewer (0: on CPUs), or cluster.executor=slurm"
        )
        raise RecipeError(Problem(keys[0], "too-large", told))
    return devices[:asked]


def _shown(visible: str, there: int | None) -> list[str]:
    devices = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or there == 0 or (re.fullmatch(r"-?\d+", name) and not 0 <= int(name) < (there or 1 << 16)):
            break
        devices.append(name)
    return devices
