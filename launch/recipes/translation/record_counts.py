"""Count the records of a data set that is on this machine, without reading them where its files tell the number."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from launch.recipes.model_files import hf_home, hub_cache
from pipeline.data.file_formats import recognize
from pipeline.data.record_count import count_records


def is_here(name: str) -> bool:
    """Return whether a file, a folder, or a data set of the Hub is on this machine."""
    return Path(name).expanduser().exists() or any(_prepared(name)) or any(_files(_raw(name)))


def count(name: str, subset: str | None, split: str) -> int | None:
    """Return the number of records of a split; None if the data are not on this machine, or do not tell.

    name: a file, a folder with data files, or a data set of the Hub, which is searched in the caches of `datasets` and the Hub.
    """
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return _of_file(path)
        if not path.is_dir() and (number := _of_prepared(name, subset, split)) is not None:
            return number
        files = list(_files(path if path.is_dir() else _raw(name)))
        files = [file for file in files if subset and subset in str(file)] or files
        files = [file for file in files if split in file.name or split == file.parent.name] or files
        counts = [_of_file(file) for file in files]
    except (OSError, ValueError):
        return None
    return sum(filter(None, counts)) if counts and None not in counts else None


def _raw(name: str) -> Path:
    return hub_cache() / f"datasets--{name.replace('/', '--')}" / "snapshots"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("**/*")) if path.suffix in (".parquet", ".jsonl", ".json") and path.is_file())


def _prepared(name: str) -> Iterator[Path]:
    """Yield the descriptions of a data set that `datasets` has prepared, which writes org___name in lower case."""
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets").expanduser()
    for folder in dict.fromkeys((name.replace("/", "___"), name.replace("/", "___").lower())):
        yield from sorted((cache / folder).glob("*/*/*/dataset_info.json"))


def _of_prepared(name: str, subset: str | None, split: str) -> int | None:
    for path in _prepared(name):
        if path.parents[2].name.startswith(subset or "default"):
            splits = json.loads(path.read_text()).get("splits") or {}
            if split in splits:
                return int(splits[split]["num_examples"])
    return None


def _of_file(path: Path) -> int | None:
    if path.suffix == ".json" and recognize(path).name != "json":
        return None  # such as a description of the data set
    return count_records(path)
