"""Check the commands and folders of agents (`env.NAME.kind=agent`) before the job loads a model for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.executors.containers import runtime
from launch.preflight import user_imports
from pipeline.config import ComponentConfig, Problem, Recipe, environment_component, generates
from pipeline.config.environments import read_kwargs, scorers
from pipeline.environments.agent import AgentArguments
from pipeline.environments.agent_places import search_path
from pipeline.sandbox.container import ENVIRONMENT
from pipeline.sandbox.image import ImageError, read_image

OF_SYSTEM = ("/bin/", "/sbin/", "/usr/", "/lib/", "/opt/", "/etc/")
"""Beginnings of paths that are an image's own."""


def problems(recipe: Recipe, executor: str, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each program or folder of an agent that does not exist where it runs.

    executor: local, slurm or allocation. notes: receives programs that only other nodes may have.
    """
    ours = [Path.cwd(), *user_imports.places(recipe)]
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
                    yield from _check_in_image(f"{key}.{part}", command, arguments.sandbox.image, ours, notes)
                elif not runtime.has_another_python(component):
                    yield from _check_here(f"{key}.{part}", str(command[0]), executor, notes)


def _check_here(key: str, program: str, executor: str, notes: list[str]) -> Iterator[Problem]:
    if shutil.which(program, path=search_path()):
        return
    if os.path.isfile(program):
        yield Problem(key, "permission-denied", f"got {program}, which is not executable. Try chmod +x {program}")
    elif os.sep in program or executor == "local":
        message = f"got the program {program}; expected one in PATH, or the path of one, relative to the recipe's folder"
        yield Problem(key, "file-not-found", message)
    else:
        notes.append(f"{key}: {program} is not in PATH here; only the job finds out whether its nodes have it")


def _check_in_image(
    key: str, command: Sequence[object], image: str, ours: Sequence[Path], notes: list[str]
) -> Iterator[Problem]:
    """Yield a problem for each file that an image lacks: of a folder image any file, of others those in folders of the recipe.

    ours: folders of the recipe. notes: receives other files of this machine.
    """
    try:
        root = "" if "{" in image or read_image(image).form != "folder" else image
    except ImageError:  # another check reports it
        return
    program, path = str(command[0]), ENVIRONMENT["PATH"]
    for argument in map(str, command):
        if not (argument.startswith("/") and os.path.isfile(argument)) or (root and os.path.lexists(f"{root}{argument}")):
            continue
        advice = f"Try a folder with it as {key.rpartition('.')[0]}.files, and {os.path.basename(argument)} as argument"
        what = f"got {argument}, a file of this machine, which the container of {image} does not have. {advice}"
        if root or any(Path(argument).is_relative_to(folder) for folder in ours):
            yield Problem(key, "not-mounted", what)
        elif not argument.startswith(OF_SYSTEM):
            notes.append(f"{key}: {what}, unless the image has it")
    places = [f"{folder}/{program}" for folder in path.split(":")]
    if root and os.sep not in program and not any(os.path.lexists(f"{root}{place}") for place in places):
        yield Problem(key, "file-not-found", f"got the program {program}, which {image} does not have in {path}")
