"""Read records: from files, the `datasets` library, a generator in this package, or your own callable.

A record is a dict, or with a processor a list of dicts; `pipeline.data.records` documents its columns. `pipeline.data.sources`
reads files; `pipeline.data.mixture` mixes several data sets. Not supported: streaming data sets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import GENERATED_DATASETS, NAMED_DATASETS, DatasetConfig, is_dotted_path
from pipeline.data import named, sources
from pipeline.data.arrow_records import ArrowRecords
from pipeline.data.processors import ProcessedRecords, as_records
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError

Record = dict[str, Any]


@contextlib.contextmanager
def with_key(key: str) -> Iterator[None]:
    """Name a data set in the problems of the block, which loads it. key: the data set's key, such as data.train."""
    try:
        yield
    except RecipeError as error:
        tails = [problem.key.removeprefix("data") if problem.key.startswith("data.") else "" for problem in error.problems]
        problems = [replace(problem, key=key + tail) for problem, tail in zip(error.problems, tails, strict=True)]
        raise RecipeError(*problems) from error


def load_records(dataset: DatasetConfig, seed: int, drops: bool = False) -> Sequence[Record]:
    """Return the records of a data set, without holding any out. The arguments are those of `load_split`."""
    return _repeat_records(_sample_records(_read(dataset, seed, drops), dataset), dataset)


def load_split(dataset: DatasetConfig, seed: int, drops: bool = False) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return (training records, records that `split_validation_size` holds out) of a data set.

    seed: the seed of a generated data set or a callable if `kwargs` have none. drops: whether the stream drops bad records. A
    malformed record of a text file then raises when it is read, not here; it counts in draws, sizes and positions.

    `dataset_name` may be one of NAMED_DATASETS or GENERATED_DATASETS, a folder of files or from `save_to_disk`, anything that
    `datasets.load_dataset` accepts (a folder with a configuration, a name in the local caches; HF_HUB_OFFLINE=1 avoids the
    network; `kwargs` then go to `load_dataset`), or the dotted path of a callable (split, seed=, **kwargs).

    Draws depend only on `dataset.seed` and the number of records, and equal those of `datasets`:
    `shuffle(seed).select(range(max_samples))`, then `train_test_split(split_validation_size, seed)`. Raise RecipeError if
    `dataset` has neither or both of dataset_name and data_path, if the split or the records do not exist, or if one of the two
    returned parts would be empty.
    """
    records = _sample_records(_read(dataset, seed, drops), dataset)
    size = dataset.split_validation_size
    if not size:
        return _repeat_records(records, dataset), []
    order = np.random.default_rng(dataset.seed).permutation(len(records))
    held_out = math.ceil(size * len(records)) if size < 1 else int(size)
    if not 0 < held_out < len(records):
        message = (
            f"split_validation_size {size:g} holds out {held_out} of {len(records)} records; expected at least one to remain"
        )
        raise RecipeError(Problem("data", "too-large", message))
    return _repeat_records(_Selection(records, order[held_out:]), dataset), _Selection(records, order[:held_out])


def _read(dataset: DatasetConfig, seed: int, drops: bool) -> Sequence[Record]:
    records = _raw(dataset, seed, drops)
    return ProcessedRecords(records, dataset.processor) if dataset.processor else records


def _raw(dataset: DatasetConfig, seed: int, drops: bool) -> Sequence[Record]:
    name, path = dataset.dataset_name, dataset.data_path
    if (name is None) == (path is None):
        raise RecipeError(Problem("data", "missing-value", "expected either dataset_name or data_path"))
    records: Sequence[Record]
    if name is None:
        saved = sources.saved_folder(dataset)
        records = _from_library(str(saved), dataset) if saved else sources.open_files(sources.files_of(dataset), dataset, drops)
    elif files := sources.plain_folder(dataset):
        records = sources.open_files(files, dataset, drops)
    elif name in GENERATED_DATASETS:
        records = _from_callable(GENERATED_DATASETS[name], dataset, seed)
    elif name not in NAMED_DATASETS and is_dotted_path(name) and not Path(name).exists():
        records = _from_callable(name, dataset, seed)
    else:
        records = _from_library(name, dataset)
    if not len(records):
        raise RecipeError(Problem("data", "no-records", f"{path or name} has no records"))
    return records


def _sample_records(records: Sequence[Record], dataset: DatasetConfig) -> Sequence[Record]:
    if dataset.max_samples is None:
        return records
    return _Selection(records, np.random.default_rng(dataset.seed).permutation(len(records))[: dataset.max_samples])


def _repeat_records(records: Sequence[Record], dataset: DatasetConfig) -> Sequence[Record]:
    return records if dataset.repeat == 1 else _Selection(records, np.tile(np.arange(len(records)), dataset.repeat))


def record_location(records: Sequence[Record], index: int) -> str:
    """Return the location of a record for messages: FILE:LINE, "FILE, row N", or the record's number."""
    while (source := getattr(records, "source", None)) is not None:
        records, index = source(index)
    place = getattr(records, "place", None)
    return place(index) if place else f"record {index} (from 0)"


def readable(records: Sequence[Record]) -> Iterator[tuple[int, Record]]:
    """Yield (number, record) of each record that can be read. Skip the others, which the stream refuses or drops later.

    If a processor makes several records of one, they have its number.
    """
    for index in range(len(records)):
        try:
            record = records[index]
        except (OSError, MemoryError):
            raise
        except Exception:  # of a decoder or of a user's data set: each raises what it likes
            continue
        yield from ((index, made) for made in as_records(record))


class _Selection(Sequence):
    """The records with certain numbers, in the order of `numbers`, `[N]` int64."""

    def __init__(self, records: Sequence[Record], numbers: np.ndarray) -> None:
        self._records, self._numbers = records, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Record:
        return self._records[int(self._numbers[index])]

    def source(self, index: int) -> tuple[Sequence[Record], int]:
        """Return (the underlying records, the number in them of our record `index`)."""
        return self._records, int(self._numbers[index])


class _MappedRecords(Sequence):
    """The rows of a data set as records, which the function `make` makes on access."""

    def __init__(self, rows: Sequence[Record], make: Callable[[Record], Record]) -> None:
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self._make(self._rows[index])

    def source(self, index: int) -> tuple[Sequence[Record], int]:
        """Return (the rows, the number of the row from which record `index` is made)."""
        return self._rows, index


def _from_library(name: str, dataset: DatasetConfig) -> Sequence[Record]:
    """Return the records of a data set that the library `datasets` reads."""
    from pipeline.data import hub_datasets  # needs `datasets`, which submission may lack

    if name in NAMED_DATASETS:
        return _MappedRecords(
            ArrowRecords(hub_datasets.named_rows(name, dataset), name), lambda row: named.record(dataset, row)
        )
    rows = hub_datasets.rows(name, dataset)
    return ArrowRecords(rows, name, dataset.tools_key, lambda: hub_datasets.data_files(name, dataset))


def _from_callable(path: str, dataset: DatasetConfig, seed: int) -> Sequence[Record]:
    """Return the records of a class or function at a dotted path, called with (split, seed=, **kwargs)."""
    try:
        make = user_code.load(path)
    except user_code.NotFound as error:
        raise RecipeError(Problem("data", "not-importable", f"dataset_name '{path}': {error}")) from error
    try:
        records = make(dataset.split or "train", **{"seed": seed, **dataset.kwargs})
    except TypeError as error:
        message = f"dataset_name '{path}': the call with (split, seed=, **kwargs) fails: {error}"
        raise RecipeError(Problem("data", "wrong-type", message)) from error
    if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")) or isinstance(records, str | dict):
        message = f"dataset_name '{path}' returned a {type(records).__name__}; expected a sequence of records"
        raise RecipeError(Problem("data", "wrong-type", message))
    if len(records) and not isinstance(records[0], dict):
        message = f"dataset_name '{path}': got a {type(records[0]).__name__} as the first record; expected a dict"
        raise RecipeError(Problem("data", "wrong-type", message))
    return records
