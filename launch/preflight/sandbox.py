"""What can be said, before a run is submitted, against running programs that its policy writes: can they be contained?

On this machine that is tried. Other nodes are asked when their ranks start, which end with the same words. Left out: the nodes
of a Slurm job, and images, of which nothing is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.config import EnvironmentConfig, Recipe, generates, tools_of
from pipeline.sandbox import ways
from pipeline.sandbox.limits import CONTAINED, SandboxError

RUNS_CODE = ("code", "code_interpreter")


def problems(recipe: Recipe, executor: str, notes: list[str]) -> Iterator[str]:
    """executor: local, slurm or allocation. `notes` takes in what cannot be told here."""
    if not generates(recipe):
        return
    asked = {key: kwargs for name, config in recipe.env.items() for key, kwargs in _asked(f"env.{name}", config)}
    contained = {key: kwargs for key, kwargs in asked.items() if kwargs.get("sandbox", "auto") in ("auto", *CONTAINED)}
    for key in sorted(set(asked) - set(contained)):
        if asked[key]["sandbox"] == "none":
            notes.append(f"{key}.sandbox: none, so what the policy writes runs with this user's rights: its files, its network")
    if contained and executor != "local":
        notes.append(
            f"{', '.join(contained)}: whether programs can be contained shows on the generate nodes, when their ranks start;"
            " that takes bubblewrap (`bwrap`) in their image, or user namespaces"
        )
        return
    for key, kwargs in contained.items():
        try:
            ways.choose(kwargs.get("sandbox", "auto"), tuple(kwargs.get("readable", ())))
        except SandboxError as error:
            yield f"{key}: {error}"


def _asked(key: str, config: EnvironmentConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where programs are run, and with which kwargs."""
    if config.kind in RUNS_CODE:
        yield f"{key}.kwargs", dict(config.kwargs)
    if config.kind == "tools":
        try:
            tools = tools_of(config.kwargs.get("tools"))
        except ValueError:
            return  # a problem of the recipe's own, which says so
        for name, tool in tools.items():
            if tool.kind == "python":
                yield f"{key}.kwargs.tools.{name}.kwargs", dict(tool.kwargs)
