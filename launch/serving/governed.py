"""Decide what the overrides of a request may set: which keys belong to the service, and what values may name.

A request chooses among the recipes of the service's checkout, and changes values in them. The person who runs the service
decides what a run executes, where it writes, what is recorded about it and with which keys it encrypts, by setting these keys
in the recipes.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.api.overrides import flat
from pipeline.config import RECIPES, Problem, refuse
from pipeline.config.paths import is_path, names_own_code

EXECUTES, WRITES, RECORDS, SENDS = "what a run executes", "where a run writes", "what is recorded", "where a run sends data"
GOVERNED = {
    "run_dir": WRITES,
    "module_folders": EXECUTES,
    "cluster.audit": RECORDS,
    "cluster.sbatch_options": EXECUTES,
    "cluster.*.sbatch_options": EXECUTES,
    "cluster.*.srun_args": EXECUTES,
    "cluster.*.python": EXECUTES,
    "cluster.*.env_vars": EXECUTES,
    "cluster.*.container_image": EXECUTES,
    "cluster.*.container_mounts": EXECUTES,
    "cluster.*.container_workdir": EXECUTES,
    "cluster.*.container_args": EXECUTES,
    "cluster.container_runtime": EXECUTES,
    "checkpointing.encryption": "how files are encrypted",
    "env.*.rewards": EXECUTES,
    "env.*.kwargs.sandbox": "where programs of the policy run",
    "env.*.kwargs.readable": "what programs of the policy read",
    "env.*.kwargs.url": SENDS,
    "evaluate.lm_eval.include_path": EXECUTES,
    "logger.mlflow.tracking_uri": SENDS,
    "logger.mlflow.artifact_location": SENDS,
    "logger.trackio.space": SENDS,
    "data.*.kwargs.cache_dir": WRITES,
    "evaluate.tasks.*.data.kwargs.cache_dir": WRITES,
    "policy.generation.vllm_kwargs.*_cls": EXECUTES,
    "policy.generation.vllm_kwargs.trust_remote_code": EXECUTES,
    "policy.generation.vllm_kwargs.logits_processors": EXECUTES,
    "policy.generation.vllm_kwargs.*_plugin*": EXECUTES,
    "policy.generation.vllm_kwargs.download_dir": WRITES,
}
"""Pattern of keys that no request may set -> what these keys decide.

A section that contains such a key cannot be replaced as a whole either.
"""
OF_SUITE = {"baseline": WRITES, "folder": WRITES, "name": WRITES}
"""Like GOVERNED, for keys of a sweep's suite."""
SECTIONS = re.compile(r"(?:runs\.[^.]+\.overrides|search\.overrides|search\.parameters|overrides)\.")
"""Prefixes of keys of a suite that are followed by a key of a recipe."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(:/|::\S*/)")
"""The beginning of an address that a library may open as a file, such as file:/a or simplecache::/a."""
OF_TORCH = ("*.optimizer.name", "*.scheduler*")
"""Patterns of keys whose texts name classes that a job imports. Classes of torch are allowed."""
OF_ENGINE = "*.vllm_kwargs.*"
"""Pattern of keys whose texts vLLM may import: dotted names, and any text if the key contains "module"."""
DOTTED = re.compile(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+")


def check(overrides: Mapping[str, Any], folders: Sequence[Path], of_suite: bool = False) -> None:
    """Raise RecipeError, code no-access, for overrides that set what belongs to the service.

    folders: values may name files and folders below these, and below recipes/. of_suite: the overrides are of a sweep's suite,
    so the keys in OF_SUITE count too.
    """
    inside = [folder.resolve() for folder in (*folders, RECIPES)]
    refuse(problem for key, value in flat(overrides).items() for problem in _problems(key, value, inside, of_suite))


def _problems(key: str, value: Any, inside: Sequence[Path], of_suite: bool) -> Iterator[Problem]:
    recipe_key = SECTIONS.sub("", key, count=1) if of_suite else key
    table = GOVERNED | OF_SUITE if of_suite and recipe_key == key else GOVERNED
    if pattern := next((pattern for pattern in table if _sets(recipe_key, value, pattern)), None):
        description = f"got a whole section, with {pattern} in it" if _is_around(recipe_key, pattern) else "got a value"
        yield _deny(key, f"{description}; expected none, because the service's recipes decide {table[pattern]}")
        return
    if recipe_key == "needs" and not (isinstance(value, list) and all(isinstance(n, str) and _is_recipe(n) for n in value)):
        yield _deny(key, "got something other than a list of names; expected names of recipes in recipes/, not paths")
        return
    for text in _texts(value):
        if "${" in text:
            yield _deny(key, "got an interpolation; expected a value, because the service resolves none in a request")
        elif names_own_code(recipe_key, text) or _names_class(recipe_key, text):
            yield _deny(key, f"got '{text[:80]}', which names code; expected code that a recipe of the service names")
        elif SCHEME.match(text) or (_is_file(recipe_key, text) and not _is_inside(text, inside)):
            places = ", ".join(map(str, inside))
            message = f"got '{text[:80]}'; expected a path below one of {places}. Try `folders` in the service's settings"
            yield _deny(key, message)


def _deny(key: str, message: str) -> Problem:
    return Problem(key, "no-access", message)


def _sets(key: str, value: Any, pattern: str) -> bool:
    """Return whether a value for `key` sets a key of a pattern: the same key, a section around it, or a key inside it."""
    fits = all(fnmatch.fnmatchcase(part, glob) for part, glob in zip(key.split("."), pattern.split("."), strict=False))
    return fits and (not _is_around(key, pattern) or isinstance(value, dict | None))


def _is_around(key: str, pattern: str) -> bool:
    return key.count(".") < pattern.count(".")


def _is_recipe(name: str) -> bool:
    return NAME.fullmatch(name) is not None and (RECIPES / f"{name.removesuffix('.yaml')}.yaml").is_file()


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value at any depth, and the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from (str(name), *_texts(item))


def _names_class(key: str, text: str) -> bool:
    """Return whether a text may name code that a job imports.

    Only keys of optimizers, of schedules and of vLLM name code. Classes of torch are allowed for optimizers and schedules.
    """
    if any(fnmatch.fnmatchcase(key, pattern) for pattern in OF_TORCH):
        return "." in text and not text.startswith("torch.")
    return fnmatch.fnmatchcase(key, OF_ENGINE) and (DOTTED.fullmatch(text) is not None or "module" in key)


def _is_file(key: str, text: str) -> bool:
    """Return whether a library may read a text as the path of a file or a folder."""
    if text.startswith(("/", "~", "./")) or text == "." or ".." in text.split("/"):
        return True
    return (is_path(key) or "/" in text) and len(text) < 4096 and "\0" not in text and os.path.lexists(text)


def _is_inside(text: str, inside: Sequence[Path]) -> bool:
    try:
        path = Path(os.path.expanduser(text)).resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    return any(path.is_relative_to(folder) for folder in inside)
