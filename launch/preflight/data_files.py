"""Read the first records of a data set before submission: of its files, or of a generated data set.

If the number of all records is known, of generated data, Parquet or texts of up to COUNT_BYTES, they must fill a step.
"""

from __future__ import annotations

import errno
import importlib.util
import itertools
import json
import math
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
from pipeline.data import arrow_records, epochs, named, row_cache, sources, text_records
from pipeline.data.datasets import load_records, with_key
from pipeline.data.file_formats import FileFormat
from pipeline.data.record_count import count_records
from pipeline.recipe import user_files

SCAN_BYTES = 16 << 20  # read from each data file: parsed, up to 40 times as much memory
SCAN_LINE = 8 << 20  # longest line there
COUNT_BYTES = 32 << 20  # largest file whose lines are counted, in tens of milliseconds; a larger one is likely to fill a step
CHECKED_FILES = 64  # of a data set
NOTED_BYTES = 1 << 30  # of converted files, which a note then announces
FEW, FEW_BYTES = 4, 1 << 20  # read from each file but the first
GENERATED_ROWS = 16  # of a generated data set
SHOWN_NUMBERS = 5  # reported per fault, besides the first
ROWS = FileFormat("parquet")  # numbers generated records too

Record = dict[str, Any]


@dataclass
class FirstRecords:
    """The first records of a data set, or of one of its files."""

    key: str  # of the recipe, which names the data
    path: Path
    form: FileFormat = ROWS
    numbered: list[tuple[int, Record]] = field(default_factory=list)  # (number, record), numbered as `form` does
    bad: dict[str, list[int]] = field(default_factory=dict)  # fault of what is no record -> numbers
    others: list[FirstRecords] = field(default_factory=list)  # of the other files: SHOWN_ROWS of each

    def location(self, number: int) -> str:
        """Return the location of a record in the form that the job's messages have."""
        return self.form.place(self.path, number)

    @property
    def unit(self) -> str:
        """Return the unit of the numbers: line, row or record."""
        return self.form.unit


def first_records(
    key: str, dataset: DatasetConfig, notes: list[str], most: int | None = None, drops: bool = False
) -> FirstRecords | None:
    """Return the first records of a data set; None if they are not read from files here.

    key: the data set's key, such as data.train. notes: receives why files are not read. most: maximum number of records; None:
    as many as SCAN_BYTES hold. drops: whether bad records are dropped. Raises RecipeError for a file that cannot be read, or if
    there are no records.
    """
    name, source = dataset.dataset_name, f"{key}.dataset_name"
    if dataset.data_path is None and (name is None or name in NAMED_DATASETS or not Path(name).is_dir()):
        return None
    with with_key(key):
        files = _files(dataset)
    source = source if dataset.data_path is None else f"{key}.data_path"
    if not files:
        notes.append(f"{source}: only the job checks its records: only `datasets` knows which of its files it reads")
        return None
    try:
        parts = [of_file(source, files[0], dataset.tools_key, most, drops)]
        for path in files[1:CHECKED_FILES] if most is None else ():
            parts.append(of_file(source, path, dataset.tools_key, FEW, drops, FEW_BYTES))
    except ImportError as error:
        notes.append(f"{source}: only the job checks its records: {error.name} is not installed here. Try pip install pyarrow")
        return None
    except Undecoded as error:
        notes.append(f"{source}: only the job checks its records: {error}")
        return None
    if most is None and (size := sum(map(_converted_bytes, files[:CHECKED_FILES]))) > NOTED_BYTES:
        notes.append(
            f"{source}: the job converts {size / 1e9:.1f} GB of Parquet or more into {row_cache.folder()} as it reads."
            " HF_DATASETS_CACHE=FOLDER sets another place"
        )
    if len(files) > CHECKED_FILES and most is None:
        notes.append(f"{source}: only the job reads {len(files) - CHECKED_FILES:,} of its {len(files):,} files")
    parts[0].others = parts[1:]
    return parts[0]


def _converted_bytes(path: Path) -> int:
    """Return how many bytes the job converts of a Parquet file; 0 for other files, and for one that it reads into memory."""
    if sources.recognized(path).name != "parquet":
        return 0
    size = arrow_records.decoded_bytes(path)
    return size if size > arrow_records.IN_MEMORY else 0


def _files(dataset: DatasetConfig) -> list[Path]:
    """Return the files of a data set; [] if only the library `datasets` knows them. Raises RecipeError."""
    if dataset.data_path is None:
        saved = Path(dataset.dataset_name or "")
        if not any((saved / name).is_file() for name in sources.SAVED):
            return sources.plain_folder(dataset) or []
    elif (folder := sources.saved_folder(dataset)) is None:
        return sources.files_of(dataset)
    else:
        saved = folder
    if (saved / sources.SAVED[0]).is_file():
        saved = saved / (dataset.split or "train")
    try:
        state = json.loads(user_files.read_text(saved / sources.SAVED[1]))
        return [saved / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError):  # `split_problems` tells of a split that is missing
        return []


def of_file(
    key: str, path: Path, tools_key: str | None = None, most: int | None = None, drops: bool = False, size: int = SCAN_BYTES
) -> FirstRecords:
    """Return the first records of a file, and the numbers of what is no record.

    most: maximum number of records; None: as many as `size` bytes hold. drops: whether bad records are dropped; then the
    function ends before a record of more than SCAN_LINE bytes, which the job may drop. Raises RecipeError for a file that
    cannot be read, ImportError where pyarrow is missing, and Undecoded.
    """
    try:
        records = FirstRecords(key, path, sources.recognized(path))
        if records.form.is_text:
            first = text_records.first_records(path, records.form, size, SCAN_LINE)
        else:
            _refuse_extensions(arrow_records.schema_of(path, records.form))
            first = arrow_records.first_rows(path, records.form, size, tools_key)
        for number, record in itertools.islice(first, most):
            if isinstance(record, ValueError):
                records.bad.setdefault(str(record), []).append(number)
            else:
                records.numbered.append((number, record))
        if not (records.numbered or records.bad):
            message = f"{path} is empty; expected at least one record. Try another file, or remove it"
            raise RecipeError(Problem(key, "no-records", message))
    except OSError as error:
        if not (drops and error.errno == errno.EFBIG):
            raise RecipeError(sources.unreadable(key, path, error)) from None
    except RecipeError as error:
        raise RecipeError(*(replace(problem, key=key) for problem in error.problems)) from None
    except ValueError as error:
        raise RecipeError(Problem(key, "bad-format", str(error))) from None
    return records


class Undecoded(Exception):
    """Raised for a file with columns of a type that only the library `datasets` decodes."""


def _refuse_extensions(schema: Any) -> None:
    names = [column.name for column in schema if "extension<" in str(column.type).replace("extension<arrow.json>", "")]
    if names:
        raise Undecoded(f"its column {names[0]} has a type that `datasets` must decode")


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
    return FirstRecords(f"{key}.dataset_name", Path(dataset.dataset_name), numbered=[*enumerate(records)])


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
        records = of_file(f"{key}.dataset_name", paths[0], dataset.tools_key, most)
    except (ImportError, Undecoded):
        return None
    if named_dataset:
        records.numbered = [(number, named.record(dataset, row)) for number, row in records.numbered]
    return records


def split_problems(key: str, dataset: DatasetConfig) -> Iterator[Problem]:
    """Yield a problem if a data set's folder, or its copy in the hub's cache, lacks the subset or the split.

    Nothing is checked where `datasets` is not installed. key: as in `first_records`.
    """
    name = dataset.dataset_name
    if dataset.data_path is not None:
        saved: list[Problem] = []
        with collected(saved):
            name = str(sources.saved_folder(dataset) or "") or None  # `first_records` reports a problem of the paths
    if name is None or name in GENERATED_DATASETS:
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
    records: Any = dataset.kwargs.get("size") if dataset.dataset_name in GENERATED_DATASETS else None
    if dataset.processor:
        return None
    if dataset.data_path is not None:
        try:
            counts = [count_records(path, COUNT_BYTES) for path in _files(dataset)]
        except RecipeError:  # another check reports it
            return None
        records = sum(filter(None, counts)) if counts and None not in counts else None
    if not isinstance(records, int):
        return None
    records = min(records, dataset.max_samples or records)
    if size := dataset.split_validation_size:
        records -= math.ceil(size * records) if size < 1 else int(size)
    return max(0, records) * dataset.repeat


# ---- messages --------------------------------------------------------------------------------------------------------------


def also(numbers: list[int], unit: str = "line") -> str:
    """Return the end of a message about a fault of several records, which lists their numbers."""
    if not (other_numbers := numbers[1:]):
        return ""
    numbers_text = ", ".join(map(str, other_numbers[:SHOWN_NUMBERS])) + (" ..." if len(other_numbers) > SHOWN_NUMBERS else "")
    return f" (and in {len(other_numbers)} more: {unit}{'s' if len(other_numbers) > 1 else ''} {numbers_text})"
