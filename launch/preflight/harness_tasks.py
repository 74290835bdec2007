"""Check that lm-evaluation-harness has the tasks that an evaluation names.

The harness takes seconds of CPU to index its tasks, so its files are searched as text. The job refuses a name that the search
accepts by mistake.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from launch.executors import containers
from pipeline.algorithms.evaluate import HARNESS_DOCUMENTS, HARNESS_FORMATS, HARNESS_KINDS
from pipeline.config import Problem, Recipe, skipped_tasks, trains

NAME = re.compile(
    r"""^[ \t]*(?:-\ *)?["']?(?:task|group|tag)["']?\ *:\ *([^#\n]+)  # one name, or a list in brackets
    | ^[ \t]*-\ *["']?([\w.:+-]+)["']?""",  # an entry of a list
    re.MULTILINE | re.VERBOSE,
)
SUFFIXES = ("", ".yaml", ".yml")
MOST_BYTES = 1 << 20
"""Largest size of a file that is read; a folder of the user's may hold others, such as weights without a suffix."""


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each name that is not a task, a group or a tag of the harness installed here."""
    asked = [] if trains(recipe) or containers.has_another_python(recipe.cluster.generate) else list(_names(recipe))
    spec = importlib.util.find_spec("lm_eval") if asked else None
    if spec is None or not spec.submodule_search_locations:
        return
    root, own = Path(spec.submodule_search_locations[0]) / "tasks", recipe.evaluate.lm_eval.include_path
    likely = [path for path in root.iterdir() if path.is_dir() and any(name.startswith(path.name) for _, name in asked)]
    known = _defined([*likely, *([Path(own)] if own else [])])
    if not known.issuperset(name for _, name in asked):
        known |= _defined([root])
    for key, name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.75)
            hint = f"Try {near[0]}" if near else "Try a name that `lm_eval ls tasks` prints, or evaluate.lm_eval.include_path"
            yield Problem(key, "not-a-choice", f"got {name}; expected a task of lm-evaluation-harness. {hint}")


def _names(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, the task that it names). The job looks up patterns such as `mmlu_*`."""
    skipped = skipped_tasks(recipe)
    for name, task in recipe.evaluate.tasks.items():
        form: str = task.format
        if task.kind in HARNESS_KINDS and form != HARNESS_DOCUMENTS and name not in skipped:
            yield f"evaluate.tasks.{name}.format", HARNESS_FORMATS.get(form, form)
    for name in recipe.evaluate.lm_eval.tasks:
        if not set(name) & set("*?["):
            yield "evaluate.lm_eval.tasks", name


def _defined(folders: Iterable[Path]) -> set[str]:
    """Return the names of tasks, groups and tags in the files below folders, and other words that stand where names may."""
    names: set[str] = set()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in SUFFIXES or "yaml" in path.name:
                for value, entry in NAME.findall(_text(path)):
                    names |= {word.strip(" \t\r\"'") for word in value.strip().strip("[]").split(",")} if value else {entry}
    return names


def _text(path: Path) -> str:
    """Return the text of a file; "" if it is no file, is large, or cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            return path.read_text(errors="replace")
    return ""
