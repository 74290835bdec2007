"""Read records: from a JSONL file, the `datasets` library, a generator in this package, or a user's own callable.

A record is a dict; `pipeline.data.chat` says what it must hold. Several are mixed by
`pipeline.data.mixture`. Leaves out: streaming data sets.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline import user_code
from pipeline.config import DATASET_CARDS, GENERATED_DATASETS, NAMED_DATASETS, DatasetConfig, is_dotted_path, nearest_dataset
from pipeline.data import named

Record = dict[str, Any]


def load_records(dataset: DatasetConfig, seed: int) -> Sequence[Record]:
    """Return all records of a data set, as `load_split` reads them."""
    return _repeated(_sampled(_read(dataset, seed), dataset), dataset)


def load_split(dataset: DatasetConfig, seed: int) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return the records of a data set, and those of them that `split_validation_size` holds out. `seed` is for generated data
    sets whose `kwargs` give none.

    `dataset_name` may be one of NAMED_DATASETS or GENERATED_DATASETS, a folder that `save_to_disk` wrote, whatever
    `datasets.load_dataset` takes (a folder of JSON or Parquet files, a name in the local caches; HF_HUB_OFFLINE=1 keeps it off
    the network; `kwargs` then go to `load_dataset`), or the dotted path of a callable (split, seed=, **kwargs).

    What is drawn depends on the data set's own seed and its number of records alone. Both draws are those of `datasets`:
    `shuffle(seed).select(range(max_samples))`, and then `train_test_split(split_validation_size, seed)`. Raises ValueError if
    the recipe names no data set or two, if it has no such split or no records, or if one of the two parts would have none.
    """
    records = _sampled(_read(dataset, seed), dataset)
    size = dataset.split_validation_size
    if not size:
        return _repeated(records, dataset), []
    order = np.random.default_rng(dataset.seed).permutation(len(records))
    held_out = math.ceil(size * len(records)) if size < 1 else int(size)
    if not 0 < held_out < len(records):
        raise ValueError(
            f"data: split_validation_size {size:g} would hold {held_out} of {len(records)} records out; some must be left"
        )
    return _repeated(_Chosen(records, order[held_out:]), dataset), _Chosen(records, order[:held_out])


def _read(dataset: DatasetConfig, seed: int) -> Sequence[Record]:
    name = dataset.dataset_name
    if (name is None) == (dataset.data_path is None):
        raise ValueError("data: give either dataset_name or data_path (a JSONL file)")
    if dataset.data_path is not None:
        records: Sequence[Record] = JSONLRecords(Path(dataset.data_path))
    elif name in GENERATED_DATASETS:
        records = _from_callable(GENERATED_DATASETS[name], dataset, seed)
    elif name in NAMED_DATASETS:
        records = _Made(_from_hub(dataset), lambda row: named.record(dataset, row))
    elif is_dotted_path(name) and not Path(name).exists():
        records = _from_callable(name, dataset, seed)
    else:
        records = _from_datasets(dataset)
    if not len(records):
        raise ValueError(f"data: {dataset.data_path or name} has no records")
    return records


def _sampled(records: Sequence[Record], dataset: DatasetConfig) -> Sequence[Record]:
    if dataset.max_samples is None:
        return records
    return _Chosen(records, np.random.default_rng(dataset.seed).permutation(len(records))[: dataset.max_samples])


def _repeated(records: Sequence[Record], dataset: DatasetConfig) -> Sequence[Record]:
    return records if dataset.repeat == 1 else _Chosen(records, np.tile(np.arange(len(records)), dataset.repeat))


def record_location(records: Sequence[Record], index: int) -> str:
    """Return where a record is, for people: FILE:LINE, or its number."""
    while isinstance(records, _Chosen):
        records, index = records.source(index)
    return records.place(index) if isinstance(records, JSONLRecords) else f"record {index} (from 0)"


class _Chosen(Sequence):
    """Some records, in an order. numbers: `[N]` int64."""

    def __init__(self, records: Sequence[Record], numbers: np.ndarray) -> None:
        self._records, self._numbers = records, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Record:
        return self._records[int(self._numbers[index])]

    def source(self, index: int) -> tuple[Sequence[Record], int]:
        """Return the records that one was chosen from, and its number there."""
        return self._records, int(self._numbers[index])


class _Made(Sequence):
    """Each record made of a row when it is asked for."""

    def __init__(self, rows: Sequence[Record], make: Callable[[Record], Record]) -> None:
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self._make(self._rows[index])


class JSONLRecords(Sequence):
    """A JSONL file, read record by record: only the offsets of its lines stay in memory. Blank lines do not count.

    Every line is read once at the start. Raises ValueError, with file and line, if one is not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._begins, self._sizes, self._lines = array("q"), array("q"), array("q")
        begin = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._parse(line, number)
                self._begins.append(begin)
                self._sizes.append(len(line))
                self._lines.append(number)
            begin += len(line)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return msgspec.json.decode(os.pread(self._file.fileno(), self._sizes[index], self._begins[index]))

    def place(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def _parse(self, line: bytes, number: int) -> None:
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path}:{number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{self._path}:{number}: a record is a JSON object, this is a {type(record).__name__}")


def _from_hub(dataset: DatasetConfig) -> Sequence[Record]:
    """Return the rows of a named data set; of several subsets, one after the other."""
    import datasets

    known = NAMED_DATASETS[dataset.dataset_name]
    parts = [
        _load(known.repository, subset, dataset.split or known.split, dataset.kwargs)
        for subset in ((dataset.subset,) if dataset.subset else known.subsets or (None,))
    ]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _from_datasets(dataset: DatasetConfig) -> Sequence[Record]:
    import datasets

    folder, split = Path(dataset.dataset_name), dataset.split or "train"
    if not any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return _load(dataset.dataset_name, dataset.subset, split, dataset.kwargs)
    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split not in loaded:
        raise ValueError(f"data: {folder} has no split '{split}'; there are: {', '.join(loaded)}")
    return loaded[split]


def _load(name: str, subset: str | None, split: str, kwargs: dict[str, Any]) -> Sequence[Record]:
    """Call `load_dataset`, which without a network finds only what it has prepared before: so from the hub cache's files, if
    `hf download` has put them there. Raises ValueError if there is no such data set, subset or split.
    """
    import datasets

    where = name if Path(name).is_dir() else _snapshot(name, kwargs.get("revision")) or name
    if where != name:
        kwargs = {key: value for key, value in kwargs.items() if key != "revision"}
    options = {"name": subset, **kwargs} if subset else kwargs
    try:
        return datasets.load_dataset(where, split=split, **options)
    except (ConnectionError, FileNotFoundError) as error:
        meant = f"; did you mean {close}?" if (close := nearest_dataset(name)) else ""
        raise ValueError(f"data: '{name}' is neither a folder nor in the local caches: {error}{meant}") from error
    except ValueError as error:
        raise ValueError(f"data: '{name}': {error}") from error


def _snapshot(name: str, revision: str | None) -> str | None:
    """Return the folder of a repository's files in the hub cache; None if there are none, or nothing but what describes
    them.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if any(path.is_file() and path.name not in DATASET_CARDS for path in Path(folder).rglob("*")) else None


def _from_callable(path: str, dataset: DatasetConfig, seed: int) -> Sequence[Record]:
    """Return what a class or a function at a dotted path gives, called with (split, seed=, **kwargs)."""
    try:
        make = user_code.load(path)
    except user_code.NotFound as error:
        raise ValueError(f"data: dataset_name '{path}': {error}") from error
    try:
        records = make(dataset.split or "train", **{"seed": seed, **dataset.kwargs})
    except TypeError as error:
        raise ValueError(f"data: dataset_name '{path}': called with (split, seed=, **kwargs): {error}") from error
    if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")) or isinstance(records, str | dict):
        raise ValueError(f"data: dataset_name '{path}' gives a {type(records).__name__}, not a sequence of records")
    if len(records) and not isinstance(records[0], dict):
        raise ValueError(f"data: dataset_name '{path}': a record is a dict, its first is a {type(records[0]).__name__}")
    return records
