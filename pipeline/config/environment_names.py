"""Replace values from the environment by the names of their variables in everything that leaves a run folder.

A recipe may take values from the environment of the submission: `${oc.env:NAME}`. The run folder's recipe.yaml has the values,
because continuations and other nodes need them. `environment.json` beside it maps each such key to its text in the recipe.
Bundles, reports and trackers get these texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import config_tree, yaml_text
from pipeline.config.config_tree import ConfigValue
from pipeline.files import small_files, storage

FILE = "environment.json"
SHORTEST = 6
"""Shortest value that is searched for in a log, in characters: shorter ones would match everywhere."""


def write(run_dir: Path, texts: Mapping[str, Any]) -> None:
    """Write environment.json. If there are no texts, remove the file of an earlier submission.

    texts: dotted key -> its text in the recipe.
    """
    if texts:
        small_files.write(run_dir / FILE, dict(texts))
    else:
        (run_dir / FILE).unlink(missing_ok=True)


def named(run_dir: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of recipe.yaml, in which names of variables replace values from the environment."""
    texts = _texts(run_dir)
    tree = config_tree.from_plain(recipe, None)
    for key, text in texts.items():
        if tree.find(key) is not None:
            tree.set(key, ConfigValue(text))
    return tree.plain() if texts else recipe


def recipe_text(run_dir: Path) -> str:
    """Return the text of recipe.yaml, in which names of variables replace values from the environment. Raises OSError."""
    if _texts(run_dir):
        return yaml_text.dump(named(run_dir, _plain(run_dir)))
    return small_files.read_text(run_dir / "recipe.yaml", longest=small_files.LONGEST_YAML) or ""


def recipe_file(run_dir: Path) -> Path:
    """Return the path of a file called recipe.yaml with the text of `recipe_text`.

    It is the run's own file if this has no values from the environment, else a file that is written to tracking/.
    """
    if not (run_dir / FILE).exists():
        return run_dir / "recipe.yaml"
    path = run_dir / "tracking/recipe.yaml"
    path.parent.mkdir(exist_ok=True)
    storage.write_durably(path, recipe_text(run_dir))
    return path


def masked(run_dir: Path, text: str) -> str:
    """Return a text of a run in which names of variables replace values from the environment.

    Only values of at least SHORTEST characters are replaced.
    """
    if not (texts := _texts(run_dir)):
        return text
    tree = config_tree.from_plain(_plain(run_dir), None)
    values: dict[str, str] = {}
    for key, written in sorted(texts.items(), key=lambda item: "oc.env" in str(item[1])):  # rather a name than a reference
        node = tree.find(key)
        if isinstance(node, ConfigValue) and isinstance(node.value, str) and len(node.value) >= SHORTEST:
            values[node.value] = str(written)
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, values[value])
    return text


def _texts(run_dir: Path) -> dict[str, Any]:
    return small_files.read(run_dir / FILE, dict[str, Any]) or {}


def _plain(run_dir: Path) -> dict[str, Any]:
    found = small_files.read_yaml(run_dir / "recipe.yaml")
    return found if isinstance(found, dict) else {}
