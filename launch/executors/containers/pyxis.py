"""Start ranks in images by pyxis (https://github.com/NVIDIA/pyxis), a plugin of Slurm that adds options to srun."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from launch.executors import slurm_client
from launch.executors.containers import image_files
from launch.executors.containers.runtime import ContainerRuntime
from launch.executors.slurm_client import SlurmError
from pipeline.config import ComponentConfig, Problem

OPTIONS = ("--container-image", "--container-mounts", "--container-workdir")
"""Options of pyxis that have a key in the recipe."""
IN_REGISTRY = re.compile(r"([a-z]+://)?[A-Za-z0-9][\w.$:+@#/-]*")  # [USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]
ERROR = re.compile(r"^(?:(\S+): |\[\S+\] )error: pyxis: ?(.*)")
"""Matches an error line of pyxis, whose groups are (node, message). Such lines with enroot's messages follow. The node is
`slurmstepd-NAME`; Slurm 26.05 prints the time instead."""


class Pyxis(ContainerRuntime):
    """Imports images by enroot on each node."""

    name = "pyxis"
    pulls = True
    mount_flags = re.compile(r"[a-z][a-z0-9=_-]*(\+[a-z][a-z0-9=_-]*)*")
    flags_text = "flags such as ro+rprivate"
    special_mounts = ("tmpfs", "umount")

    @override
    def start(self, component: ComponentConfig) -> tuple[list[str], list[str]]:
        options = [f"--container-image={component.container_image}"]
        if component.container_mounts:
            options.append(f"--container-mounts={','.join(component.container_mounts)}")
        if component.container_workdir:
            options.append(f"--container-workdir={component.container_workdir}")
        return options, []

    @override
    def image_problems(self, key: str, image: str) -> Iterator[Problem]:
        key = f"{key}.container_image"
        if image.startswith(("/", ".")):
            expected = "a squashfs image, such as `enroot import` makes"
            yield from image_files.problems(key, Path(image), (image_files.SQUASHFS,), expected)
        elif image.endswith((".sqsh", ".squashfs", ".sif")) or image.startswith("~"):  # others are in a registry
            path = Path(image).expanduser().absolute()
            yield Problem(
                key, "ambiguous", f"got '{image}', which pyxis looks for in a registry. Try the absolute path, {path}"
            )
        elif not IN_REGISTRY.fullmatch(image):
            yield Problem(key, "bad-format", f"got '{image}'; expected a path or [USER@][REGISTRY#]IMAGE[:TAG]")

    @override
    def option_problems(self, key: str, component: ComponentConfig) -> Iterator[Problem]:
        for argument in component.srun_args:
            option = argument.partition("=")[0]
            if option.startswith("--con") and any(
                known_option.startswith(option) for known_option in OPTIONS
            ):  # srun accepts a prefix of a name too
                yield Problem(f"{key}.srun_args", "contradiction", f"got {argument}; expected {key}.container_... instead")
        if component.container_args:
            message = "has no effect with cluster.container_runtime=pyxis, whose options are srun's"
            yield Problem(f"{key}.container_args", "has-no-effect", f"{message}. Try {key}.srun_args")

    @override
    def added_mounts(self, component: ComponentConfig) -> list[str]:
        return [str(Path.home())] if "--container-mount-home" in component.srun_args else []

    @override
    def environment_problems(self) -> Iterator[Problem]:
        for variable in sorted(name for name in os.environ if name.startswith("PYXIS_CONTAINER_")):
            message = f"pyxis applies the environment variable {variable} to components that do not set the same option"
            yield Problem("cluster", "contradiction", f"{message}. Try to unset it")

    @override
    def installation_problems(self, keys: list[str], notes: list[str]) -> Iterator[Problem]:
        try:
            options = slurm_client.run_command("srun", "--help")
        except SlurmError as why:
            notes.append(f"whether srun takes a container image was not checked: {why}")
            return
        if "--container-image" not in options:
            message = "srun here has no --container-image, which comes with the pyxis plugin (https://github.com/NVIDIA/pyxis)"
            advice = "Try cluster.container_runtime=apptainer, or null, with a Python environment on the shared file system"
            yield from (Problem(key, "not-installed", f"{message}. {advice}") for key in keys)

    @override
    def start_errors(self, lines: list[str]) -> list[str]:
        errors = [match for line in lines if (match := ERROR.match(line))]
        return list(dict.fromkeys(error[2].rstrip() for error in errors if error[1] == errors[0][1]))  # of the first node
