"""Where records come from: a JSONL file, the `datasets` library, or a generator in this package.

A record is a dict; `pipeline.data.chat` says what it must hold. Leaves out: streaming data sets, mixtures.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import DatasetConfig
from pipeline.data import scratchpad

GENERATED = {"scratchpad_addition": scratchpad.addition, "scratchpad_preferences": scratchpad.preferences}


def load_records(dataset: DatasetConfig, seed: int) -> Sequence[dict[str, Any]]:
    """The records of a data set. `seed` is for generated ones whose `kwargs` give none.

    `dataset_name` may be a folder that `save_to_disk` wrote, or whatever `datasets.load_dataset` takes (a folder of JSON or
    Parquet files, a name in the local cache; HF_HUB_OFFLINE=1 keeps it off the network); `kwargs` then go to `load_dataset`.
    Raises ValueError if the recipe names no data set or two, or the data set has no such split or no records.
    """
    if (dataset.dataset_name is None) == (dataset.data_path is None):
        raise ValueError("data: give either dataset_name or data_path (a JSONL file)")
    if dataset.data_path is not None:
        records: Sequence[dict[str, Any]] = JSONLRecords(Path(dataset.data_path))
    elif dataset.dataset_name in GENERATED:
        records = GENERATED[dataset.dataset_name](dataset.split, **{"seed": seed, **dataset.kwargs})
    else:
        records = _from_datasets(dataset)
    if not len(records):
        raise ValueError(f"data: {dataset.data_path or dataset.dataset_name} has no records")
    return records


class JSONLRecords(Sequence):
    """A JSONL file, read record by record: only the offsets of its lines stay in memory. Blank lines do not count.

    Every line is read once at the start. Raises ValueError, with file and line, if one is not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._begins, self._sizes = array("q"), array("q")
        begin = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._parse(line, number)
                self._begins.append(begin)
                self._sizes.append(len(line))
            begin += len(line)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return msgspec.json.decode(os.pread(self._file.fileno(), self._sizes[index], self._begins[index]))

    def _parse(self, line: bytes, number: int) -> None:
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path}:{number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{self._path}:{number}: a record is a JSON object, this is a {type(record).__name__}")


def _from_datasets(dataset: DatasetConfig) -> Sequence[dict[str, Any]]:
    import datasets

    folder = Path(dataset.dataset_name)
    if not any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(dataset.dataset_name, split=dataset.split, **dataset.kwargs)
    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if dataset.split not in loaded:
        raise ValueError(f"data: {folder} has no split '{dataset.split}'; there are: {', '.join(loaded)}")
    return loaded[dataset.split]
