"""Build the pyxis options of srun (https://github.com/NVIDIA/pyxis) for a component's container, and its tasks' variables.

pyxis keeps the image's value of a variable that the image sets. So lines of bash set the variables that the job needs again
inside the container: the path of the code, and the caches that were checked at submission, since an image has its own home
folder. `launch/preflight/container_images.py` checks the images, mounts and caches.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from launch.executors.executor import ROOT
from launch.recipes.model_files import hf_home
from pipeline.config import ComponentConfig

OPTIONS = ("--container-image", "--container-mounts", "--container-workdir")
"""Options of pyxis that have a key in the recipe."""
CACHES = ("HF_HUB_CACHE", "HF_DATASETS_CACHE")


def has_another_python(component: ComponentConfig) -> bool:
    """Return whether the ranks of a component run another Python than this process."""
    return component.container_image is not None or component.python not in (None, sys.executable)


def options(component: ComponentConfig) -> list[str]:
    """Return the container options for srun; [] without an image."""
    if component.container_image is None:
        return []
    arguments = [f"--container-image={component.container_image}"]
    if component.container_mounts:
        arguments.append(f"--container-mounts={','.join(component.container_mounts)}")
    if component.container_workdir:
        arguments.append(f"--container-workdir={component.container_workdir}")
    return arguments


def task_exports(component: ComponentConfig) -> list[str]:
    """Return lines of bash that export a task's caches and PYTHONPATH; [] without an image."""
    if component.container_image is None:
        return []
    caches = {"HF_HOME": _absolute(str(hf_home()))} | {
        name: _absolute(value) for name in CACHES if (value := os.environ.get(name))
    }
    return [
        "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in caches.items()),
        f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]


def _absolute(path: str) -> str:
    """Return the absolute path. `~` is expanded here, because it is another folder in the image."""
    return str(Path(path).expanduser().absolute())
