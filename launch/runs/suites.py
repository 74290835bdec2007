"""Merge the recipe of an evaluation from a suite, the evaluated model's keys and the command line, in rising precedence."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.recipes import gguf
from launch.runs.evaluation_sources import Source
from pipeline import config
from pipeline.config import RECIPES, Loaded, Problem, RecipeError, config_tree, interpolation

TASKS = ["evaluate", "tasks"]
SUITES = RECIPES / "suites"
HARNESS = "lm_eval"
"""suite=lm_eval:mmlu,hellaswag runs these tasks of lm-evaluation-harness, with the other keys of the suite `lm_eval`."""


def name_of(suite: str) -> str:
    """Return a suite's name, which is also the name of its folders. The suite's file is not read."""
    prefix, colon, tasks = suite.partition(":")
    if prefix == HARNESS and colon:
        return re.sub(r"[^\w.-]+", "_", f"{HARNESS}_{tasks}".rstrip(","))[:100]
    return Path(suite).stem


def find(suite: str) -> tuple[str, Path, list[str]]:
    """Return (name, file, tasks of lm-evaluation-harness) of a suite. Raises RecipeError."""
    prefix, colon, tasks = suite.partition(":")
    if prefix == HARNESS and colon:
        names = [name for name in tasks.split(",") if name]
        if not names:
            raise RecipeError(Problem("suite", "missing-value", f"got '{suite}'; expected {HARNESS}:TASK or {HARNESS}:A,B"))
        return name_of(suite), SUITES / f"{HARNESS}.yaml", names
    path = config_tree.find_file(suite, SUITES, "suite", f"; or {HARNESS}:TASK,..., or a path to a recipe")
    return path.stem, path, []


def task_names(suite: str) -> list[str]:
    """Return the names of a suite's tasks; [] if lm-evaluation-harness names some of them. Raises RecipeError."""
    _, path, tasks = find(suite)
    tree = config_tree.load_with_parents(path)
    section = tree.find(".".join(TASKS))
    if tasks or tree.find(f"evaluate.{HARNESS}") or not isinstance(section, config_tree.ConfigMapping):
        return []
    return list(section.children)


def task_metric(suite: str, task: str) -> str | None:
    """Return a task's main metric as its suite has it; None if only the evaluation knows. Raises RecipeError."""
    metric = config_tree.load_with_parents(find(suite)[1]).find(".".join((*TASKS, task, "metric")))
    return str(metric.value) if isinstance(metric, config_tree.ConfigValue) else None


def inspect(suite: str, source: Source, overrides: Iterable[str], cluster_and_more: Mapping[str, Any] = {}) -> Loaded:
    """Return the recipe of an evaluation, with its problems.

    cluster_and_more: nested keys that override the source's keys, and are overridden by the command line. Raises RecipeError
    for files that cannot be read.
    """
    name, path, tasks = find(suite)
    suite_values: dict[str, Any] = {"name": name, "run_dir": str(source.run_dir)}
    if tasks:
        suite_values["evaluate"] = {HARNESS: {"tasks": tasks}}
    layers = [
        _layer(suite_values, "suite="),
        _layer(source.values, source.origin),
        _layer(dict(cluster_and_more), "evaluation"),
    ]
    overrides = list(overrides)
    loaded = gguf.with_folders(config.inspect(str(path), overrides, above=layers))
    loaded.problems[:0] = _unknown_tasks(loaded, path, overrides, layers)
    if config.trains(loaded.recipe) and "algorithm" not in loaded.faulty:
        message = f"got {path}, whose algorithm is {loaded.recipe.algorithm}; expected a suite, with algorithm: evaluate"
        raise RecipeError(Problem("suite", "not-a-choice", message))
    if "evaluate" in source.values and Path(loaded.recipe.run_dir).absolute() != source.run_dir.absolute():
        message = f"got {loaded.recipe.run_dir}; expected {source.run_dir}, the folder of this evaluation. Try without run_dir"
        raise RecipeError(Problem("run_dir", "unsupported", message))
    return loaded


def _unknown_tasks(
    loaded: Loaded, path: Path, overrides: Sequence[str], layers: Sequence[config_tree.ConfigMapping]
) -> list[Problem]:
    """Return a problem for each task that only the command line names and that has other problems: it may be misspelt."""
    named = {
        parts[2] for override in overrides if (parts := override.partition("=")[0].split("."))[:2] == TASKS and len(parts) > 3
    }
    files = functools.reduce(config_tree.merge, [*config_tree.load_layers(path), *layers], config_tree.ConfigMapping())
    section = files.find(".".join(TASKS))
    names = list(section.children) if isinstance(section, config_tree.ConfigMapping) else []
    problems = []
    for name in sorted(named.difference(names)):
        key = ".".join([*TASKS, name])
        near = difflib.get_close_matches(name, names, 1)
        if names and any(problem.key.startswith(f"{key}.") for problem in loaded.problems):
            hint = f"did you mean {near[0]}? " if near else ""
            message = f"is not a task of the suite; {hint}the tasks are {', '.join(names)}"
            problems.append(Problem(key, "unknown-key", message, config_tree.COMMAND_LINE))
    return problems


def _layer(values: dict[str, Any], origin: str) -> config_tree.ConfigMapping:
    tree = config_tree.from_plain(interpolation.escaped(values), origin)
    assert isinstance(tree, config_tree.ConfigMapping), "of a mapping"
    return tree
