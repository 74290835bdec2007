"""Read the first records of a data set before submission: of JSONL or Parquet files, or of a generated data set.

The job reads a folder with the `datasets` library, which a login node need not have. If the number of all records is known, of
generated data or of files up to COUNT_BYTES, the training data must fill a step.
"""

from __future__ import annotations

import errno
import importlib.util
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.preflight import bounded
from launch.recipes.model_files import hub_snapshot
from launch.terminal.units import plural
from pipeline.config import (
    GENERATED_DATASETS,
    NAMED_DATASETS,
    DatasetConfig,
    Problem,
    Recipe,
    RecipeError,
    collected,
    only_evaluates,
    section,
    training_sets,
    trains,
)
from pipeline.data import epochs, named
from pipeline.data.arrow_records import ArrowRecords
from pipeline.data.datasets import load_records, with_key
from pipeline.data.records import parse_record
from pipeline.recipe import user_files

SCAN_BYTES = 16 << 20  # read from each data file: parsed, up to 40 times as much memory
SCAN_LINE = 8 << 20  # longest line there
COUNT_BYTES = 32 << 20  # largest file whose lines are counted, in tens of milliseconds; a larger one is likely to fill a step
BATCH_ROWS = 64  # of Parquet, read at a time
GENERATED_ROWS = 16  # of a generated data set
SHOWN_NUMBERS = 5  # reported per fault, besides the first
SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""Split -> words of paths by which `datasets` recognizes it."""

Record = dict[str, Any]


@dataclass
class FirstRecords:
    """The first records of a data set.

    Lines are numbered from 1, rows of Parquet from 0.
    """

    key: str  # of the recipe, which names the data
    path: Path
    rows: bool = False  # of Parquet
    numbered: list[tuple[int, Record]] = field(default_factory=list)  # (number, record)
    bad: dict[str, list[int]] = field(default_factory=dict)  # fault of lines that are no records -> their numbers

    def location(self, number: int) -> str:
        """Return the location of a record in the form that the job's messages have: `PATH:LINE`, or `PATH, row N (from 0)`."""
        return f"{self.path}, row {number} (from 0)" if self.rows else f"{self.path}:{number}"

    @property
    def unit(self) -> str:
        """Return the unit of the numbers: line or row."""
        return "row" if self.rows else "line"


def first_records(
    key: str, dataset: DatasetConfig, notes: list[str], most: int | None = None, drops: bool = False
) -> FirstRecords | None:
    """Return the first records of a data set; None if they are not read from files here.

    key: the data set's key, such as data.train. notes: receives why a folder is not read. most: maximum number of records;
    None: as many as SCAN_BYTES hold. drops: whether bad records of a JSONL file are dropped. Raises RecipeError for a file that
    cannot be read, or has no records.
    """
    if dataset.data_path is not None:
        return of_lines(FirstRecords(f"{key}.data_path", Path(dataset.data_path)), most, drops)
    name, key = dataset.dataset_name, f"{key}.dataset_name"
    if name is None or name in NAMED_DATASETS or not Path(name).is_dir():
        return None
    try:
        path = _first_file(Path(name), dataset)
        if path.suffix == ".jsonl":
            return of_lines(FirstRecords(key, path), most)
        return _of_parquet(FirstRecords(key, path, rows=True), dataset, most)
    except _LeftToTheJob as error:
        notes.append(f"{key}: only the job checks the records of {name}: {error}")
        return None


def first_generated(key: str, dataset: DatasetConfig, seed: int, notes: list[str]) -> FirstRecords | None:
    """Return the first records of a generated data set; None for other data sets. Raises RecipeError for wrong kwargs.

    seed: that of the recipe. notes: receives why they cannot be generated here.
    """
    if dataset.dataset_name not in GENERATED_DATASETS or dataset.data_path is not None:
        return None
    size = dataset.kwargs.get("size")
    few = min(size, GENERATED_ROWS) if isinstance(size, int) else size
    sample = replace(dataset, kwargs={**dataset.kwargs, **({"size": few} if "size" in dataset.kwargs else {})})

    try:
        records = bounded.call(lambda: list(load_records(sample, seed)))
    except RecipeError as error:
        raise RecipeError(*(replace(problem, key=key) for problem in error.problems)) from None
    except bounded.Unbounded as error:
        notes.append(f"{key}: only the job generates its records: here {error}")
        return None
    return FirstRecords(f"{key}.dataset_name", Path(dataset.dataset_name), rows=True, numbered=[*enumerate(records)])


def first_cached(key: str, dataset: DatasetConfig, most: int) -> FirstRecords | None:
    """Return the first records of a data set in the hub's cache, if it has Parquet files whose names begin with the split.

    Returns None for other data sets. The job may read further files, which may have longer records. Raises RecipeError for a
    file that cannot be read.
    """
    name = dataset.dataset_name
    if name is None or name in GENERATED_DATASETS or Path(name).exists():
        return None
    named_dataset = NAMED_DATASETS.get(name)
    folder = hub_snapshot("datasets", named_dataset.repository if named_dataset else name, dataset.kwargs.get("revision"))
    split = dataset.split or (named_dataset.split if named_dataset else "train")
    subset = dataset.subset or (named_dataset.subsets[0] if named_dataset and named_dataset.subsets else None)
    paths = sorted(folder.rglob(f"{split}-*.parquet")) if folder else []
    paths = [path for path in paths if subset is None or subset in path.parts]
    if not paths:
        return None
    try:
        records = _of_parquet(FirstRecords(f"{key}.dataset_name", paths[0], rows=True), dataset, most)
    except _LeftToTheJob:
        return None
    if named_dataset:
        records.numbered = [(number, named.record(dataset, row)) for number, row in records.numbered]
    return records


def split_problems(key: str, dataset: DatasetConfig) -> Iterator[Problem]:
    """Yield a problem if a data set's folder, or its copy in the hub's cache, lacks the subset or the split.

    Nothing is checked where `datasets` is not installed. key: as in `first_records`.
    """
    name = dataset.dataset_name
    if name is None or dataset.data_path is not None or name in GENERATED_DATASETS:
        return
    named_dataset = NAMED_DATASETS.get(name)
    repository = named_dataset.repository if named_dataset else name
    is_folder = named_dataset is None and Path(name).is_dir()
    folder = Path(name) if is_folder else hub_snapshot("datasets", repository, dataset.kwargs.get("revision"))
    if folder is None or importlib.util.find_spec("datasets") is None:
        return
    from pipeline.data import hub_datasets  # takes half a second of CPU

    split = dataset.split or (named_dataset.split if named_dataset else "train")
    found: list[Problem] = []
    for subset in (dataset.subset,) if dataset.subset or not named_dataset else named_dataset.subsets or (None,):
        with collected(found), with_key(key):
            hub_datasets.check_split(str(folder), subset, split, dataset.kwargs)
    yield from found


# ---- JSONL -------------------------------------------------------------------------------------------------------------------


def of_lines(records: FirstRecords, most: int | None = None, drops: bool = False) -> FirstRecords:
    """Add the first `most` records of a JSONL file, and the numbers of lines that are none. Raises as `lines_of` does."""
    for number, line in itertools.islice(lines_of(records.key, records.path, drops), most):
        try:
            records.numbered.append((number, parse_record(line)))
        except ValueError as error:
            records.bad.setdefault(str(error), []).append(number)
    return records


def lines_of(key: str, path: Path, drops: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) of a JSONL file's first SCAN_BYTES, without empty lines. Raises RecipeError.

    drops: whether bad records are dropped; then the function ends before a line of more than SCAN_LINE bytes, which the job may
    drop.
    """
    try:
        file = user_files.open_file(path)
    except (OSError, ValueError) as error:
        raise RecipeError(unreadable(key, path, error)) from None
    with file:
        has_lines = False
        read = 0
        try:
            for number, line in enumerate(user_files.lines(file, SCAN_LINE), 1):
                if (read := read + len(line)) > SCAN_BYTES:
                    return
                if number == 1 and (format_name := user_files.other_format(line)):
                    raise RecipeError(Problem(key, "bad-format", f"{path}: {format_name}"))
                if line.strip():
                    has_lines = True
                    yield number, line.strip()
        except OSError as error:
            if drops and error.errno == errno.EFBIG:
                return
            raise RecipeError(unreadable(key, path, error)) from None
        if not has_lines:
            raise RecipeError(Problem(key, "no-records", f"{path} is empty; expected one JSON object a line"))


# ---- folders -----------------------------------------------------------------------------------------------------------------


class _LeftToTheJob(Exception):
    """Raised if this module cannot tell which files of a folder the job reads, or how the job decodes their columns."""


def _first_file(folder: Path, dataset: DatasetConfig) -> Path:
    """Return the first file that `datasets.load_dataset` reads for the split. Raises _LeftToTheJob if that is not certain."""
    if dataset.subset or dataset.kwargs or "configs:" in _card(folder):
        raise _LeftToTheJob("a configuration of `datasets` selects its files")
    hidden = (".", "__")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = [path for path in paths if not any(part.startswith(hidden) for part in path.relative_to(folder).parts)]
    data = [path for path in paths if path.suffix in (".parquet", ".jsonl")]
    if not data or len({path.suffix for path in data}) > 1 or any(path.suffix in (".json", ".arrow", ".csv") for path in paths):
        raise _LeftToTheJob("expected only Parquet files, or only .jsonl files")
    words = {path: set(re.split(r"[-._ 0-9/]+", str(path.relative_to(folder)))) for path in data}
    split = dataset.split or "train"
    if any(path_words & split_words for path_words in words.values() for split_words in SPLITS.values()):
        data = [path for path in data if words[path] & SPLITS.get(split, set())]
    elif split != "train":
        data = []
    if not data:
        raise _LeftToTheJob(f"no path of a file contains the word {split}")
    return data[0]


def _card(folder: Path) -> str:
    try:
        return user_files.read_text(folder / "README.md")
    except (OSError, ValueError):
        return ""


def _of_parquet(records: FirstRecords, dataset: DatasetConfig, most: int | None) -> FirstRecords:
    try:
        import pyarrow.parquet  # the job has it; a login node may not
    except ImportError:
        raise _LeftToTheJob("pyarrow is not installed here. Try pip install pyarrow") from None
    rows: list[Record] = []
    read = 0
    try:
        with user_files.open_file(records.path) as file:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)
            if "extension<" in str(table.schema_arrow):
                raise _LeftToTheJob("it has columns that `datasets` must decode")
            for batch in table.iter_batches(BATCH_ROWS):
                rows += batch.to_pylist()
                read += batch.nbytes
                if read > SCAN_BYTES or (most is not None and len(rows) >= most):
                    break
    except (OSError, pyarrow.ArrowException) as error:
        raise RecipeError(unreadable(records.key, records.path, error)) from None
    if not rows:
        raise RecipeError(Problem(records.key, "no-records", f"{records.path} has no rows; expected at least one"))
    records.numbered = list(enumerate(ArrowRecords(rows[:most], str(records.path), dataset.tools_key)))
    return records


# ---- the number of records -------------------------------------------------------------------------------------------------


def step_problems(recipe: Recipe, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem if the training data fill no step.

    notes: receives the number of steps if the end of the data ends the run.
    """
    if not trains(recipe) or only_evaluates(recipe):
        return
    counts = [count(dataset) for dataset in training_sets(recipe.data).values()]
    if not counts or None in counts:
        return
    supply = epochs.of_records(recipe, sum(filter(None, counts)))
    if problem := supply.problem():
        yield problem
    elif supply.steps is not None and supply.steps < section(recipe).max_num_steps:
        rest_text = f"; the last {plural(supply.left_over, 'record')} fill no step and are not used" if supply.left_over else ""
        notes.append(f"data: {supply.source} make {plural(supply.steps, 'step')} of {supply.per_step} records{rest_text}")


def count(dataset: DatasetConfig) -> int | None:
    """Return the number of records that a run trains on in one epoch; None if it is not known."""
    generated = dataset.kwargs.get("size") if dataset.dataset_name in GENERATED_DATASETS else None
    records = _lines(Path(dataset.data_path)) if dataset.data_path else generated
    if not isinstance(records, int):
        return None
    records = min(records, dataset.max_samples or records)
    if size := dataset.split_validation_size:
        records -= math.ceil(size * records) if size < 1 else int(size)
    return max(0, records) * dataset.repeat


def _lines(path: Path) -> int | None:
    """Return the number of lines that are not blank; None for a large file, or one that another check refuses."""
    try:
        with user_files.open_file(path) as file:
            if user_files.other_format(file.read(8)) or path.stat().st_size > COUNT_BYTES:
                return None
        return user_files.count_lines(path)
    except (OSError, ValueError):
        return None


# ---- messages --------------------------------------------------------------------------------------------------------------


def also(numbers: list[int], unit: str = "line") -> str:
    """Return the end of a message about a fault of several records, which lists their numbers."""
    if not (other_numbers := numbers[1:]):
        return ""
    numbers_text = ", ".join(map(str, other_numbers[:SHOWN_NUMBERS])) + (" ..." if len(other_numbers) > SHOWN_NUMBERS else "")
    return f" (and in {len(other_numbers)} more: {unit}{'s' if len(other_numbers) > 1 else ''} {numbers_text})"


def unreadable(key: str, path: str | Path, error: Exception) -> Problem:
    """Return the problem of a file that cannot be read."""
    code = "file-not-found" if isinstance(error, FileNotFoundError) else "unreadable"
    reason = error.strerror if isinstance(error, OSError) else None
    hint = ". Try a path from the recipe's file, or on the command line from the working directory"
    return Problem(key, code, f"{path}: {reason or error}{hint if code == 'file-not-found' else ''}")
