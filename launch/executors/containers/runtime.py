"""Define what a container runtime does, and what is the same in all of them.

Every runtime starts the same lines of bash in the image (`slurm.py`). A variable that the image sets keeps the image's value
there, so these lines set the variables that the job needs again: the path of the code, and the caches that were checked at
submission, since an image has its own home folder.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from launch.executors.executor import ROOT
from launch.recipes.model_files import hf_home
from pipeline.config import ComponentConfig, Problem

CACHES = ("HF_HUB_CACHE", "HF_DATASETS_CACHE")
LACKING = {
    r"bash: .*: No such file or directory": "the image has no such program. cluster.{}.python names a Python of the image",
    r"(?m)^\s*(ModuleNotFoundError: No module named|.*Error while finding module)": "the image's Python, cluster.{}.python,"
    " lacks this package, or the module's folder is in no mount and not in PYTHONPATH. containers/build.sh installs Hetstep's"
    " packages",
    r"version `GLIBC\w*_[\d.]+' not found": "a mounted program needs a newer C library than the image's. Try a Python of the"
    " image as cluster.{}.python, or an image of a newer system",
    r"lib(cuda|nvidia)\S*: cannot open shared object file": "the container has no NVIDIA driver. A component with GPUs gets the"
    " node's: check cluster.{}.gpus_per_node and the driver of that node",
    r"cannot open shared object file": "the image lacks this library. Try a Python of the image as cluster.{}.python",
}
"""Pattern of a line with which a rank ends before its first own message -> what its image lacks. {}: the component."""


class ContainerRuntime(Protocol):
    """A program that starts the ranks of a component in its image. A key is the component's, such as `cluster.train`."""

    name: str
    pulls: bool = False
    """True if every node fetches an image that a registry holds."""
    mount_flags: re.Pattern[str] = re.compile("ro|rw")
    """Matches the FLAGS of a mount SOURCE:TARGET:FLAGS."""
    flags_text: str = "ro or rw"
    """Describes these flags in messages."""
    special_mounts: tuple[str, ...] = ()
    """Sources of mounts that are no paths."""

    def start(self, component: ComponentConfig) -> tuple[list[str], list[str]]:
        """Return (options of srun, words before the task's command) that start a task in the component's image."""
        ...

    def image_problems(self, key: str, image: str) -> Iterator[Problem]:
        """Yield what is wrong with an image, as far as this machine shows it."""
        ...

    def option_problems(self, key: str, component: ComponentConfig) -> Iterator[Problem]:
        """Yield options that contradict a key, or have no effect."""
        ...

    def added_mounts(self, component: ComponentConfig) -> list[str]:
        """Return mounts, as SOURCE:TARGET:FLAGS, that do not come from the key container_mounts."""
        return []

    def environment_problems(self) -> Iterator[Problem]:
        """Yield variables of this process that would change every component's container."""
        yield from ()

    def installation_problems(self, keys: list[str], notes: list[str]) -> Iterator[Problem]:
        """Yield a problem for each key of an image if the runtime is missing. notes: receives what was not checked."""
        yield from ()

    def start_errors(self, lines: list[str]) -> list[str]:
        """Return the runtime's own errors among lines that srun printed; [] if the container has started."""
        return []

    def cause(self, errors: list[str]) -> str:
        """Return what the errors mean and what to do; "" if they say so themselves."""
        return ""


def has_another_python(component: ComponentConfig) -> bool:
    """Return whether the ranks of a component run another Python than this process."""
    return component.container_image is not None or component.python not in (None, sys.executable)


def lacking(component: str, lines: Sequence[str]) -> str:
    """Return what a component's image lacks if the last lines of a rank's log say so; "" if they do not."""
    said = "\n".join(lines)
    return next((cause.format(component) for pattern, cause in LACKING.items() if re.search(pattern, said)), "")


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
