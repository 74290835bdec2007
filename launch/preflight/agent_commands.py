"""Check the commands and folders of agents (`env.NAME.kind=agent`) before the job loads a model for them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence

from launch.executors.containers import runtime
from pipeline.config import ComponentConfig, Problem, Recipe, environment_component, generates
from pipeline.config.environments import read_kwargs, scorers
from pipeline.environments.agent import AgentArguments
from pipeline.sandbox.container import ENVIRONMENT
from pipeline.sandbox.image import ImageError, read_image

OF_SYSTEM = ("/bin/", "/sbin/", "/usr/", "/lib/", "/opt/", "/etc/")
"""Beginnings of paths that are an image's own."""


def problems(recipe: Recipe, executor: str, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each program or folder of an agent that does not exist where it runs.

    executor: local, slurm or allocation. notes: receives programs that only other nodes may have.
    """
    component: ComponentConfig = getattr(recipe.cluster, environment_component(recipe))
    for name, environment in recipe.env.items() if generates(recipe) else ():
        for scorer in scorers(name, environment):
            if scorer.kind != "agent" or not isinstance(
                arguments := read_kwargs(scorer.kwargs_key, scorer.kind, scorer.kwargs)[0], AgentArguments
            ):
                continue
            key = scorer.kwargs_key
            if arguments.files and not os.path.isdir(arguments.files):
                yield Problem(f"{key}.files", "file-not-found", f"got {arguments.files}; expected a folder")
            for part, command in (("command", arguments.command), ("score", arguments.score)):
                if not command or not isinstance(command, list):
                    continue  # other checks report the first
                if arguments.sandbox:
                    yield from _check_in_image(f"{key}.{part}", command, arguments.sandbox.image)
                elif not runtime.has_another_python(component):
                    yield from _check_here(f"{key}.{part}", str(command[0]), executor, notes)


def _check_here(key: str, program: str, executor: str, notes: list[str]) -> Iterator[Problem]:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if shutil.which(program, path=path):
        return
    if os.path.isfile(program):
        yield Problem(key, "permission-denied", f"got {program}, which is not executable. Try chmod +x {program}")
    elif os.sep in program or executor == "local":
        message = f"got the program {program}; expected one in PATH, or the path of one, relative to the recipe's folder"
        yield Problem(key, "file-not-found", message)
    else:
        notes.append(f"{key}: {program} is not in PATH here; only the job finds out whether its nodes have it")


def _check_in_image(key: str, command: Sequence[object], image: str) -> Iterator[Problem]:
    """Yield a problem for each argument that is a file of this machine, and for a program that a folder image lacks."""
    for argument in map(str, command):
        if argument.startswith("/") and os.path.isfile(argument) and not argument.startswith(OF_SYSTEM):
            name = os.path.basename(argument)
            message = (
                f"got {argument}, a file of this machine, which the container of {image} lacks. Try a folder with it as"
                f" {key.rpartition('.')[0]}.files, and {name} as argument"
            )
            yield Problem(key, "not-mounted", message)
    try:
        root = "" if "{" in image or read_image(image).form != "folder" else image
    except ImageError:  # another check reports it
        return
    program, path = str(command[0]), ENVIRONMENT["PATH"]
    places = [program] if program.startswith("/") else [f"{folder}/{program}" for folder in path.split(":")]
    if root and os.sep not in program.lstrip("/") and not any(os.path.lexists(f"{root}{place}") for place in places):
        yield Problem(key, "file-not-found", f"got the program {program}, which {image} does not have in {path}")
