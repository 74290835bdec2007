"""Find extras by name. Extras are parts that the core never imports, so that it can train without their folders.

An extra is a folder with a line in `EXTRAS`. The core asks for it by name when it needs it. It implements one of these
interfaces:

    Tracker (pipeline/trackers/tracker.py)     shows metrics
    pipeline/encryption/__init__.py            encrypts files and lines
    JobObserver (pipeline/seams/job_events.py) acts when rank 0 starts, claims the run, writes a checkpoint, or ends
    RunObserver (launch/runs/run_events.py)    acts when a command submits, continues, changes, cancels or exports a run
    read (launch/recipes/foreign.py)           reads the recipes of another project

An observer is a class that overrides the methods it needs. Its module has an instance named `OBSERVER`, and `OBSERVERS` of
job_events.py or run_events.py has the extra's name.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.recipe.problems import Problem, RecipeError


@dataclass(frozen=True)
class Extra:
    """An extra of this repository."""

    module: str | None  # what `find` returns; None if only commands of its own reach it
    paths: tuple[str, ...]  # its files and folders


GOVERNANCE = (
    "launch/governance",
    "launch/audit.py",
    "launch/lineage.py",
    "launch/registry.py",
    "pipeline/lineage",
)
TRACKING = ("pipeline/trackers", "pipeline/tracking", "launch/track.py")
EXTRAS = {
    "encryption": Extra("pipeline.encryption", ("pipeline/encryption",)),
    "lineage": Extra("pipeline.lineage.lineage_observer", GOVERNANCE),  # in the job
    "ancestry": Extra("launch.governance.export_lineage", GOVERNANCE),  # in commands
    "audit": Extra("launch.governance.audit_events", GOVERNANCE),
    "trackers": Extra("pipeline.trackers", TRACKING),  # their sections of the recipe
    "tracking": Extra("pipeline.tracking.supervision", TRACKING),  # in the job
    "nemo_rl": Extra("launch.recipes.nemo_rl.reader", ("launch/recipes/nemo_rl",)),
    "prime_rl": Extra("launch.recipes.prime_rl.reading_prime_rl", ("launch/recipes/prime_rl",)),
    "trl": Extra("launch.recipes.trl.reading_trl", ("launch/recipes/trl",)),
    "verl": Extra("launch.recipes.verl.reading_verl", ("launch/recipes/verl",)),
    "pages": Extra(None, ("launch/pages", "launch/report.py")),
    "sweeps": Extra(None, ("launch/sweeps", "launch/sweep.py")),
    "serving": Extra(None, ("launch/serving", "launch/serve.py")),
    "api": Extra(None, ("launch/api",)),
}


def is_here(name: str) -> bool:
    """Return whether an extra is in this copy of the repository. Does not import it."""
    module = EXTRAS[name].module
    assert module is not None, f"{name}: the core does not reach it"
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the package that holds it
        return False
    return spec is not None and spec.origin is not None  # a folder that is left without files has no origin


def find(name: str) -> Any | None:
    """Return the module of an extra; None if it is not here."""
    return importlib.import_module(str(EXTRAS[name].module)) if is_here(name) else None


def observers(names: Iterable[str]) -> list[Any]:
    """Return the `OBSERVER` of the module of each extra that is here."""
    return [module.OBSERVER for name in names if (module := find(name))]


def load(name: str, key: str, got: object) -> Any:
    """Return the module of an extra. Raises RecipeError if it is not here. key, got: the key that asks for it, its value."""
    for problem in missing(name, key, got):
        raise RecipeError(problem)
    return find(name)


def missing(name: str, key: str, got: object) -> Iterator[Problem]:
    """Yield a problem if an extra is not here. key, got: the key that asks for the extra, and its value."""
    if not is_here(name):
        yield Problem(key, "not-installed", f"got {got}; expected {lacking(name)}")


def lacking(name: str) -> str:
    """Return a text that names an extra which is not here, and advises to get a copy with it."""
    return f"the extra '{name}' ({EXTRAS[name].paths[0]}), which this copy of Hetstep lacks. Try a copy that has it"
