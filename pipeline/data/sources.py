"""Find the files of a data set, and read them as one sequence of records.

`data_path` is a file, a list of files, a glob such as data/*.parquet, a folder of files of one format, or a folder that
`save_to_disk` wrote. Files of a folder and of a glob come in the order of their paths. A folder whose paths contain the names
of splits, such as train-00000-of-00002.parquet, gives the files of `split`, as `datasets` does.
"""

from __future__ import annotations

import bisect
import glob
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import DatasetConfig, data_paths
from pipeline.data import file_formats
from pipeline.data.arrow_records import TableRecords
from pipeline.data.file_formats import EXPECTED, FileFormat
from pipeline.data.text_records import TextRecords
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError

KEY = "data.data_path"
MOST_ENTRIES = 100_000  # of a folder or a glob
SHOWN = 5  # names of files in a message
SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
"""Split -> words of paths by which `datasets` recognizes it."""
SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that `save_to_disk` wrote: with splits, and without."""
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", *SAVED}
OF_MODELS = ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json")

Record = dict[str, Any]


def saved_folder(dataset: DatasetConfig) -> Path | None:
    """Return the folder of `save_to_disk` that the data set names; None if it names none."""
    paths = [Path(path) for path in data_paths(dataset)]
    saved = [path for path in paths if any((path / name).is_file() for name in SAVED)]
    if saved and len(paths) > 1:
        message = f"got {saved[0]}, a folder of save_to_disk, among {len(paths)} paths; expected it alone. Try data.datasets"
        raise RecipeError(Problem(KEY, "unsupported", f"{message}, which mixes several"))
    return saved[0] if saved else None


def files_of(dataset: DatasetConfig) -> list[Path]:
    """Return the files of a data set with data_path that is no `saved_folder`. Raises RecipeError if there are none."""
    files: list[Path] = []
    for name in data_paths(dataset):
        path = Path(name)
        if path.is_dir():
            files += folder_files(path, dataset.split)
        elif is_glob(name):
            files += _matches(name)
        else:
            files.append(path)
    return files


def is_glob(name: str) -> bool:
    """Return whether a path is a glob, not the path of something that exists."""
    return glob.has_magic(name) and not os.path.exists(name)


def matches(pattern: str) -> list[Path]:
    """Return the files that a glob matches, in the order of their paths."""
    found = map(Path, itertools.islice(glob.iglob(pattern, recursive=True), MOST_ENTRIES + 1))
    return sorted((path for path in found if not path.is_dir()), key=str)


def _matches(pattern: str) -> list[Path]:
    files = matches(pattern)
    _refuse_many(pattern, files)
    if not files:
        parent = Path(next(part for part in Path(pattern).parents if not glob.has_magic(str(part))))
        seen = f"there is no folder {parent}"
        if parent.is_dir():
            seen = f"{parent} has {_names(sorted(path.name for path in itertools.islice(parent.iterdir(), MOST_ENTRIES)))}"
        message = f"got {pattern}, which matches no file; expected at least one, but {seen}. Try ** for subfolders"
        raise RecipeError(Problem(KEY, "file-not-found", message))
    return files


def folder_files(folder: Path, split: str | None) -> list[Path]:
    """Return the data files of a folder and its subfolders, or those of `split`. Raises RecipeError if there are none."""
    try:
        next(os.scandir(folder), None)
    except OSError as error:
        raise RecipeError(Problem(KEY, "unreadable", f"{folder}: {error.strerror}. Try chmod u+rx {folder}")) from None
    entries = list(itertools.islice(folder.rglob("*"), MOST_ENTRIES + 1))
    _refuse_many(folder, entries)
    hidden = (".", "__")
    entries.sort(key=str)  # the order of `datasets`
    paths = [path for path in entries if not any(part.startswith(hidden) for part in path.relative_to(folder).parts)]
    if model := next((name for name in OF_MODELS if (folder / name).is_file()), None):
        message = f"got {folder}, the folder of a model, with {model}; expected data files. Try policy.model_name for a model"
        raise RecipeError(Problem(KEY, "bad-format", message))
    kinds = {path: kind for path in paths if (kind := file_formats.suffix_format(path)) and path.name not in DESCRIPTIONS}
    data = [path for path in kinds if not path.is_dir()]
    if not data:
        others = f"it has {_names([path.name for path in paths])}" if paths else "it is empty"
        message = f"got {folder}, a folder without data files; expected files of {EXPECTED}, and {others}"
        raise RecipeError(Problem(KEY, "no-records", f"{message}. Try the path of a file, or another suffix"))
    data = _of_split(folder, data, split)
    first = {kinds[path].removesuffix("l"): path for path in reversed(data)}  # .json and .jsonl may be the same
    if len(first) > 1:
        shown = ", ".join(str(path.relative_to(folder)) for path in first.values())
        example = next(iter(first.values()))
        message = f"got files of {len(first)} formats in {folder}: {shown}; expected one format"
        raise RecipeError(Problem(KEY, "contradiction", f"{message}. Try a glob: {folder}/**/*{example.suffix}"))
    return data


def _of_split(folder: Path, data: list[Path], split: str | None) -> list[Path]:
    words = {path: set(re.split(r"[-._ 0-9/]+", str(path.relative_to(folder)))) for path in data}
    named = {name for of in words.values() for name, split_words in SPLITS.items() if of & split_words}
    asked = split or "train"
    if not named and asked == "train":
        return data
    chosen = [path for path in data if words[path] & SPLITS.get(asked, {asked})]
    if not chosen:
        expected = f"expected a split of {folder}: {', '.join(sorted(named)) or 'train'}"
        raise RecipeError(Problem("data.split", "not-a-choice", f"got {asked}; {expected}"))
    return chosen


def plain_folder(dataset: DatasetConfig) -> list[Path] | None:
    """Return the files of a dataset_name that is a folder; None if only the library `datasets` knows how to read it."""
    folder = Path(dataset.dataset_name or "")
    if dataset.dataset_name is None or not folder.is_dir() or any((folder / name).exists() for name in SAVED):
        return None
    if dataset.subset or dataset.kwargs or (dataset.split or "train") not in SPLITS or "configs:" in _card(folder):
        return None
    try:
        return folder_files(folder, dataset.split)
    except RecipeError:
        return None


def _card(folder: Path) -> str:
    try:
        return user_files.read_text(folder / "README.md")
    except (OSError, ValueError):
        return ""


def recognized(path: Path) -> FileFormat:
    """Return the format of a data file. Raises RecipeError."""
    try:
        return file_formats.recognize(path)
    except OSError as error:
        raise RecipeError(unreadable("data", path, error)) from None
    except ValueError as error:
        raise RecipeError(Problem("data", "bad-format", f"{path}: {error}")) from None


def open_files(files: Sequence[Path], dataset: DatasetConfig, drops: bool) -> Sequence[Record]:
    """Return the records of files, in order. drops: as in `TextRecords`. Raises RecipeError for a file that cannot be read."""
    return joined([_open(path, recognized(path), dataset, drops) for path in files])


def _open(path: Path, form: FileFormat, dataset: DatasetConfig, drops: bool) -> Sequence[Record]:
    try:
        if form.is_text:
            return TextRecords(path, form, drops)
        return TableRecords(path, form, dataset.tools_key)
    except OSError as error:
        raise RecipeError(unreadable("data", path, error)) from None
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(Problem("data", "bad-record", str(error))) from None


def joined(parts: Sequence[Sequence[Record]]) -> Sequence[Record]:
    """Return several sequences of records as one."""
    return parts[0] if len(parts) == 1 else JoinedRecords(parts)


class JoinedRecords(Sequence):
    """The records of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Record]]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Record:
        records, number = self.source(index)
        return records[number]

    def source(self, index: int) -> tuple[Sequence[Record], int]:
        """Return (the sequence that has record `index`, its number there)."""
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)


def unreadable(key: str, path: str | Path, error: Exception) -> Problem:
    """Return the problem of a file that cannot be read."""
    code = "file-not-found" if isinstance(error, FileNotFoundError) else "unreadable"
    reason = error.strerror if isinstance(error, OSError) else None
    hint = ". Try a path from the recipe's file, or on the command line from the working directory"
    return Problem(key, code, f"{path}: {reason or error}{hint if code == 'file-not-found' else ''}")


def _refuse_many(where: str | Path, entries: Sequence[Any]) -> None:
    if len(entries) > MOST_ENTRIES:
        message = f"got {where}, which has more than {MOST_ENTRIES:,} entries; expected a folder of data. Try a path of files"
        raise RecipeError(Problem(KEY, "too-large", message))


def _names(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "") or "nothing"
