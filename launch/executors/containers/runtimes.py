"""Registry of container runtimes: the values of `cluster.container_runtime`."""

from __future__ import annotations

from launch.executors.containers.apptainer import Apptainer
from launch.executors.containers.no_runtime import NoRuntime
from launch.executors.containers.pyxis import Pyxis
from launch.executors.containers.runtime import ContainerRuntime
from pipeline.config import ComponentConfig

RUNTIMES: dict[str, ContainerRuntime] = {runtime.name: runtime for runtime in (Pyxis(), Apptainer(), NoRuntime())}


def start(runtime: str, component: ComponentConfig) -> tuple[list[str], list[str]]:
    """Return (options of srun, words before the task's command) for a component; ([], []) without an image."""
    return RUNTIMES[runtime].start(component) if component.container_image else ([], [])
