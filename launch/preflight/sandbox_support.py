"""Check, before a run is submitted, that programs which its policy writes can be contained.

On this machine that is tried. Other nodes are asked when their ranks start, which end with the same words. Left out: the nodes
of a Slurm job, and images, of which nothing is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.config import KINDS, EnvironmentConfig, Problem, Recipe, generates, read_kwargs
from pipeline.sandbox import backends
from pipeline.sandbox.limits import ISOLATING_BACKENDS, SandboxError

if TYPE_CHECKING:
    from pipeline.environments.python_tool import SandboxArguments


def problems(recipe: Recipe, executor: str, notes: list[str]) -> Iterator[Problem]:
    """executor: local, slurm or allocation. `notes` takes in what cannot be told here."""
    if not generates(recipe):
        return
    asked = dict(one for name, config in recipe.env.items() for one in _asked(f"env.{name}.kwargs", config))
    contained = {key: arguments for key, arguments in asked.items() if arguments.sandbox in ("auto", *ISOLATING_BACKENDS)}
    for key in sorted(set(asked) - set(contained)):
        if asked[key].sandbox == "none":
            notes.append(f"{key}.sandbox: none, so what the policy writes runs with this user's rights: its files, its network")
    if contained and executor != "local":
        notes.append(
            f"{', '.join(contained)}: whether programs can be contained shows on the generate nodes, when their ranks start;"
            " that takes bubblewrap (`bwrap`) in their image, or user namespaces"
        )
        return
    for key, arguments in contained.items():
        try:
            backends.choose(arguments.sandbox, tuple(arguments.readable))
        except SandboxError as error:
            yield Problem(f"{key}.sandbox", "unsupported", str(error))


def _asked(key: str, config: EnvironmentConfig) -> Iterator[tuple[str, SandboxArguments]]:
    """Yield (key, kwargs) of each environment or tool that runs programs; problems of kwargs are the recipe's own."""
    arguments = read_kwargs(key, config)[0] if config.kind in KINDS else None
    if hasattr(arguments, "sandbox"):
        yield key, arguments
    if config.kind == "tools" and arguments:
        from pipeline.environments.tools import TOOLS, read_tool_kwargs, read_tools  # only where a recipe has tools

        for name, tool in read_tools(f"{key}.tools", arguments.tools)[0].items():
            inner = f"{key}.tools.{name}.kwargs"
            if tool.kind in TOOLS and hasattr(given := read_tool_kwargs(inner, tool)[0], "sandbox"):
                yield inner, given
