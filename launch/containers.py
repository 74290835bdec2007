"""Options of pyxis to srun (https://github.com/NVIDIA/pyxis) for a component's container, and the variables of its tasks.

An image may set variables itself, and then pyxis keeps the image's value. What the job cannot do without is therefore set
again inside: where the code is, and where the caches are that were looked into at submission, since an image has its own home.
Whether all this can work is checked in `launch/preflight/container_images.py`.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from launch.executors.base import ROOT
from launch.model_files import hf_home
from pipeline.config import ComponentConfig

OPTIONS = (
    *("--container-image", "--container-mounts", "--container-workdir", "--container-env"),
    *("--container-writable", "--container-readonly"),
)
"""Those that keys of the recipe stand for."""
CONVERSIONS = ("HETSTEP_MEGATRON_CHECKPOINT_DIR", "NRL_MEGATRON_CHECKPOINT_DIR")
"""Variables of the folder in which train ranks keep models that Megatron converted; the first that is set counts."""
CACHES = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", *CONVERSIONS)


def has_another_python(component: ComponentConfig) -> bool:
    """Return whether the ranks of a component have another Python than the one that submits."""
    return component.container_image is not None or component.python not in (None, sys.executable)


def options(component: ComponentConfig) -> list[str]:
    """Return the options for srun; none without an image."""
    if component.container_image is None:
        return []
    given = [f"--container-image={component.container_image}"]
    if component.container_mounts:
        given.append(f"--container-mounts={','.join(component.container_mounts)}")
    if component.container_workdir:
        given.append(f"--container-workdir={component.container_workdir}")
    if component.container_env:
        given.append(f"--container-env={','.join(component.container_env)}")
    if component.container_writable is not None:
        given.append("--container-writable" if component.container_writable else "--container-readonly")
    return given


def task_exports(component: ComponentConfig) -> list[str]:
    """Return lines of bash for the beginning of a task; none without an image."""
    if component.container_image is None:
        return []
    caches = {"HF_HOME": _whole(str(hf_home()))} | {name: _whole(value) for name in CACHES if (value := os.environ.get(name))}
    return [
        "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in caches.items()),
        f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]


def _whole(path: str) -> str:
    """Return an absolute path: `~` is another folder in the image."""
    return str(Path(path).expanduser().absolute())
