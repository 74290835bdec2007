"""Check the checkpoint of an evaluation and the data of its tasks before anything is submitted.

A JSONL file is read as the job reads it, up to SCAN_BYTES. For a data set that `datasets` reads, only its presence is checked.
`user_imports.py` checks the user's own formats and callables. lm-evaluation-harness takes seconds of CPU to index its tasks, so
its files are searched as text; the job refuses a name that the search accepts by mistake.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from launch.executors import containers
from launch.preflight import data_files, data_records, input_files
from pipeline.algorithms.evaluate import FORMATS, HARNESS_DOCUMENTS, HARNESS_FORMATS, HARNESS_KINDS, TaskConfig
from pipeline.checkpoints import checkpoint
from pipeline.config import Problem, Recipe, RecipeError, collected, skipped_tasks, trains
from pipeline.config import read as read_recipe
from pipeline.evaluation import task_data
from pipeline.evaluation.questions import Format

TASK_NAME = re.compile(
    r"""^[ \t]*(?:-\ *)?["']?(?:task|group|tag)["']?\ *:\ *([^#\n]+)  # one name, or a list in brackets
    | ^[ \t]*-\ *["']?([\w.:+-]+)["']?""",  # an entry of a list
    re.MULTILINE | re.VERBOSE,
)
SUFFIXES = ("", ".yaml", ".yml")
MOST_BYTES = 1 << 20
"""Largest size of a file that is read; a folder of the user's may hold others, such as weights without a suffix."""


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the checkpoint, missing data, and records that do not have the task's format."""
    if trains(recipe):
        return
    yield from _checkpoint_problems(recipe)
    skipped = skipped_tasks(recipe)
    for name, task in recipe.evaluate.tasks.items():
        if name in skipped:
            continue
        task_problems: list[Problem] = []
        with collected(task_problems):
            task_problems += _check_task(f"evaluate.tasks.{name}", task)
        yield from task_problems
    yield from harness_problems(recipe)


def _checkpoint_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if `evaluate.checkpoint` is incomplete, or of another model than the recipe's."""
    settings = recipe.evaluate
    if settings.checkpoint is None:
        return
    folder = Path(settings.checkpoint)
    folders = [folder]
    if settings.run and settings.step:
        folders.append(Path(settings.run) / f"checkpoints/step_{settings.step:06d}")
    if not any(map(checkpoint.read, folders)):
        message = f"got {folders[-1]}; expected a complete checkpoint of a run, RUN_DIR/checkpoints/step_N"
        yield Problem("evaluate.checkpoint", "no-checkpoint", message)
    run_dir = Path(settings.run) if settings.run else folder.parent.parent
    if not (run_dir / "recipe.yaml").exists():
        return
    try:
        trained = read_recipe(run_dir / "recipe.yaml").policy
    except RecipeError:  # of another version
        return
    for key in ("model_name", "hf_config_overrides"):
        configured, trained_value = getattr(recipe.policy, key), getattr(trained, key)
        if configured != trained_value:
            message = f"got {configured}; expected {trained_value}, the value in the recipe of {run_dir}. Try without the key"
            yield Problem(f"policy.{key}", "contradiction", message)


def _check_task(key: str, task: TaskConfig) -> Iterator[Problem]:
    form: Format | None = None
    if task.kind in HARNESS_KINDS or task.format in FORMATS:
        form = task_data.load_format(key, task)
    data = task.data
    if data.data_path is None:
        if data.dataset_name is None and task.kind in HARNESS_KINDS:
            return  # lm-evaluation-harness has the data set's name
        yield from input_files.check_name(f"{key}.data", data.dataset_name)
        return
    if data.dataset_name is not None:
        yield Problem(f"{key}.data", "contradiction", "got both dataset_name and data_path; expected one of them")
        return
    files: list[Path] = []
    file_problems: list[Problem] = []
    examples = data.few_shot_split if task.num_few_shot else None
    for split in dict.fromkeys(split for split in (data.split, examples) if split is not None):
        with collected(file_problems):
            files += task_data.data_files(f"{key}.data", data, split)
    yield from file_problems
    for file in files:
        yield from _check_file(f"{key}.data", file, form, data.bad_records == "drop")


def _check_file(key: str, path: Path, form: Format | None, drops: bool) -> Iterator[Problem]:
    """Yield a problem for each fault of a file's records, one for all lines with the same fault.

    key: the key of the task's data. drops: whether bad records are dropped.
    """
    records = data_files.of_lines(data_files.FirstRecords(f"{key}.data_path", path), drops=drops)
    count, bad = len(records.numbered) + sum(map(len, records.bad.values())), records.bad
    for number, record in records.numbered:
        try:
            if form is not None:
                task_data.to_question(form, record, number)
        except ValueError as error:
            bad.setdefault(str(error), []).append(number)
    yield from data_records.bad_record_problems(records, data_records.droppable(f"{key}.bad_records", drops, bad, count))


# ---- lm-evaluation-harness -------------------------------------------------------------------------------------------------


def harness_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each name that is not a task, a group or a tag of the harness installed here."""
    asked = [] if containers.has_another_python(recipe.cluster.generate) else list(_harness_names(recipe))
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


def _harness_names(recipe: Recipe) -> Iterator[tuple[str, str]]:
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
                for value, entry in TASK_NAME.findall(_text(path)):
                    names |= {word.strip(" \t\r\"'") for word in value.strip().strip("[]").split(",")} if value else {entry}
    return names


def _text(path: Path) -> str:
    """Return the text of a file; "" if it is no file, is large, or cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            return path.read_text(errors="replace")
    return ""
