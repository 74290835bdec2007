"""Check the checkpoint of an evaluation and the data of its tasks before anything is submitted.

A file is read as the job reads it, up to SCAN_BYTES. For a data set that `datasets` reads, only its presence is checked.
`user_imports.py` checks the user's own formats and callables. lm-evaluation-harness takes seconds of CPU to index all of its
tasks, so its files are searched as text for the folders that it then indexes. The job refuses what this misses.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.executors.containers import runtime
from launch.preflight import data_files, data_records, input_files
from pipeline.algorithms.evaluate import FORMATS, HARNESS_FORMATS, HARNESS_KINDS, HARNESS_OWN, TaskConfig
from pipeline.checkpoints import checkpoint
from pipeline.config import DatasetConfig, Problem, Recipe, RecipeError, collected, skipped_tasks, trains
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
    examples = data.few_shot_split if task.num_few_shot else None
    if data.data_path is None:
        if data.dataset_name is None and task.kind in HARNESS_KINDS:
            return  # lm-evaluation-harness has the data set's name
        yield from input_files.check_name(f"{key}.data", data.dataset_name)
        for split in (data.split, examples) if examples else (data.split,):
            for subset in task_data.subsets(data):
                dataset = DatasetConfig(dataset_name=data.dataset_name, subset=subset, split=split, kwargs=data.kwargs)
                yield from data_files.split_problems(f"{key}.data", dataset)
        return
    if data.dataset_name is not None:
        yield Problem(f"{key}.data", "contradiction", "got both dataset_name and data_path; expected one of them")
        return
    files: list[Path] = []
    file_problems: list[Problem] = []
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
    records, unread = data_files.FirstRecords(f"{key}.data_path", path), []
    with collected(unread), contextlib.suppress(ImportError, data_files.Undecoded):  # the job reads it
        records = data_files.of_file(f"{key}.data_path", path, drops=drops)
    count, bad = len(records.numbered) + sum(map(len, records.bad.values())), records.bad
    for number, record in records.numbered:
        try:
            if form is not None:
                task_data.to_question(form, record, number)
        except ValueError as error:
            bad.setdefault(str(error), []).append(number)
    yield from data_records.bad_record_problems(records, data_records.droppable(f"{key}.bad_records", drops, bad, count))
    yield from unread


# ---- lm-evaluation-harness -------------------------------------------------------------------------------------------------


def harness_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of names of tasks and of their data, for the harness installed here, and of tasks that run code."""
    asked = [] if runtime.has_another_python(recipe.cluster.generate) else list(_asked(recipe))
    spec = importlib.util.find_spec("lm_eval") if asked else None
    if spec is None or not spec.submodule_search_locations:
        return
    root, own = Path(spec.submodule_search_locations[0]) / "tasks", recipe.evaluate.lm_eval.include_path
    of_harness = [path for path in root.iterdir() if path.is_dir()]
    likely = [path for path in of_harness if any(name.startswith(path.name) for _, name, _ in asked)]
    more = [Path(own)] if own else []
    known = _defined([*likely, *more])
    if not known.keys() >= {name for _, name, _ in asked}:
        known = _defined([*of_harness, *more])
    for key, name, _ in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.75)
            hint = f"Try {near[0]}" if near else "Try a name that `lm_eval ls tasks` prints, or evaluate.lm_eval.include_path"
            yield Problem(key, "not-a-choice", f"got {name}; expected a task of lm-evaluation-harness. {hint}")
    asked = [(key, name, task) for key, name, task in asked if name in known]
    folders = {folder for _, name, _ in asked for folder in known[name]}
    configs = _harness_configs([name for _, name, _ in asked], (sorted(folders.union(more)), (root, *more)))
    for key, name, task in asked:
        of_records = task is not None and bool(task.data.dataset_name or task.data.data_path)
        yield from _harness_task_problems(key, name, configs.get(name, {}), of_records, own)


def _asked(recipe: Recipe) -> Iterator[tuple[str, str, TaskConfig | None]]:
    """Yield (key, the harness's task, the suite's task if it has one). The job looks up patterns such as `mmlu_*`."""
    skipped = skipped_tasks(recipe)
    for name, task in recipe.evaluate.tasks.items():
        form: str = task.format
        if task.kind in HARNESS_KINDS and form not in HARNESS_OWN and name not in skipped:
            yield f"evaluate.tasks.{name}.format", HARNESS_FORMATS.get(form, form), task
    for name in recipe.evaluate.lm_eval.tasks:
        if not set(name) & set("*?["):
            yield "evaluate.lm_eval.tasks", name, None


def _harness_configs(names: Sequence[str], choices: Iterable[Iterable[Path]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return name -> task -> its configuration, of the first choice of folders that has all tasks; {} if none has.

    Functions in configurations are names: nothing of the tasks' code is imported.
    """
    try:
        from pipeline.evaluation import lm_eval_documents  # takes half a second of CPU
    except ImportError:  # of a package that the harness needs
        return {}
    for folders in choices if names else ():
        index = lm_eval_documents.index(folders)
        with contextlib.suppress(KeyError):
            entries = {name: lm_eval_documents.leaves([name], index) for name in names}
            return {name: {task: entry.cfg or {} for task, entry in of.items()} for name, of in entries.items()}
    return {}


def _harness_task_problems(
    key: str, name: str, configs: Mapping[str, Mapping[str, Any]], of_records: bool, own: str | None
) -> Iterator[Problem]:
    """Yield problems of a task, a group or a tag of the harness, whose tasks have `configs`.

    of_records: whether the suite has the records. own: the user's folder of tasks.
    """
    if unsafe := [task for task, of in configs.items() if of.get("unsafe_code")]:
        what = name if unsafe == [name] else f"{name} with {unsafe[0]}"
        message = f"got {what}, which runs code that the model writes; expected a task that runs none. Try suite=code"
        yield Problem(key, "unsupported", f"{message}, which has a sandbox")
        return
    missing: dict[str, list[str]] = {}
    for task, of in configs.items():
        path, subset, options = of.get("dataset_path"), of.get("dataset_name"), of.get("dataset_kwargs") or {}
        if of_records or of.get("class") or of.get("custom_dataset"):
            continue
        generic = "data_files" in options and "/" not in (path or "")  # such as json
        if path is None:
            message = f"got {task}, whose file has no dataset_path; expected a data set's name. Try `dataset_path: json` with"
            hint = "`dataset_kwargs: {data_files: {test: FILE.jsonl}}`, or a suite's task with kind=lm_eval and data"
            yield Problem(key, "missing-value", f"{message} {hint}")
        elif not generic and not Path(path).exists() and not input_files.is_prepared(path, subset):
            missing.setdefault(path, []).append(subset or "")
    for path, subsets in missing.items():
        more = f" and {len(subsets) - 1} more" if len(subsets) > 1 else ""
        what = f"{path} ({subsets[0]}{more})" if subsets[0] else path
        message = f"got {name}; expected its data set {what} in the local cache {input_files.datasets_cache()}"
        load = f"TaskManager({f'include_path={own!r}' if own else ''}).load(['{name}'])"
        hint = f"""Try `python -c "from lm_eval.tasks import TaskManager; {load}"` where the hub can be reached"""
        yield Problem(key, "unavailable-dataset", f"{message}. {hint}")


def _defined(folders: Iterable[Path]) -> dict[str, set[Path]]:
    """Return name -> folders with it, for tasks, groups, tags and other words that stand where names may in the files below."""
    names: defaultdict[str, set[Path]] = defaultdict(set)
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in SUFFIXES or "yaml" in path.name:
                for value, entry in TASK_NAME.findall(_text(path)):
                    for word in value.strip().strip("[]").split(",") if value else [entry]:
                        names[word.strip(" \t\r\"'")].add(folder)
    return dict(names)


def _text(path: Path) -> str:
    """Return the text of a file; "" if it is no file, is large, or cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            return path.read_text(errors="replace")
    return ""
