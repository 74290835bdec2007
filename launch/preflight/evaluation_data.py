"""Check the checkpoint of an evaluation and the data of its tasks before anything is submitted.

A JSONL file is read as the job reads it, up to SCAN_BYTES. For a data set that `datasets` reads, only its presence is checked.
`user_imports.py` checks the user's own formats and callables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launch.preflight import data_files, data_records, input_files
from pipeline.algorithms.evaluate import FORMATS, HARNESS_KINDS, TaskConfig
from pipeline.checkpoints import checkpoint
from pipeline.config import Problem, Recipe, RecipeError, collected, skipped_tasks, trains
from pipeline.config import read as read_recipe
from pipeline.data.records import parse_record
from pipeline.evaluation import task_data
from pipeline.evaluation.questions import Format


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the checkpoint, missing data, and records that do not have the task's format."""
    if trains(recipe):
        return
    yield from _checkpoint_problems(recipe)
    skipped = skipped_tasks(recipe)
    for name, task in recipe.evaluate.tasks.items():
        if name in skipped:
            continue
        yield from _check_task(f"evaluate.tasks.{name}", task)


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
        try:
            form = task_data.load_format(key, task)
        except RecipeError as error:
            yield from error.problems
            return
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
    for split in _splits(task):
        with collected(file_problems):
            files += task_data.data_files(f"{key}.data", data, split)
    yield from file_problems
    for file in files:
        yield from _check_file(f"{key}.data", file, form, data.bad_records == "drop")


def _splits(task: TaskConfig) -> list[str]:
    """Return the splits that the job reads."""
    examples = task.data.few_shot_split
    return [task.data.split, *([examples] if task.num_few_shot and examples not in (None, task.data.split) else [])]


def _check_file(key: str, path: Path, form: Format | None, drops: bool) -> Iterator[Problem]:
    """Yield a problem for each fault of a file's records, one for all lines with the same fault.

    key: the key of the task's data. drops: whether bad records are dropped.
    """
    records = data_files.FirstRecords(f"{key}.data_path", path)
    file_problems: list[Problem] = []
    count = 0
    bad: dict[str, list[int]] = {}  # fault -> line numbers
    with collected(file_problems):
        for number, line in data_files.lines_of(records.key, path, drops):
            count += 1
            try:
                record = parse_record(line)
                if form is not None:
                    task_data.to_question(form, record, number)
            except ValueError as error:
                bad.setdefault(str(error), []).append(number)
    yield from file_problems
    yield from data_records.bad_record_problems(records, data_records.droppable(f"{key}.bad_records", drops, bad, count))
