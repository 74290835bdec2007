"""No containers: the ranks run in the nodes' own environment."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import override

from launch.executors.containers.runtime import ContainerRuntime
from pipeline.config import ComponentConfig, Problem


class NoRuntime(ContainerRuntime):
    """Refuses every image."""

    name = "none"

    @override
    def start(self, component: ComponentConfig) -> tuple[list[str], list[str]]:
        return [], []

    @override
    def image_problems(self, key: str, image: str) -> Iterator[Problem]:
        message = f"got {image}; expected null, because cluster.container_runtime is none. Try pyxis or apptainer there"
        yield Problem(f"{key}.container_image", "contradiction", message)

    @override
    def option_problems(self, key: str, component: ComponentConfig) -> Iterator[Problem]:
        yield from ()
