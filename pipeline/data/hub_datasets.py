"""Read data sets with the library `datasets`: from folders, local caches and the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from pipeline.config import DATASET_CARDS, NAMED_DATASETS, DatasetConfig, nearest_dataset
from pipeline.recipe.problems import Problem, RecipeError

Record = dict[str, Any]


def named_rows(name: str, dataset: DatasetConfig) -> Sequence[Record]:
    """Return the rows of one of NAMED_DATASETS. Several subsets are concatenated."""
    description = NAMED_DATASETS[name]
    parts: list[Any] = [
        _load(description.repository, subset, dataset.split or description.split, dataset.kwargs)
        for subset in ((dataset.subset,) if dataset.subset else description.subsets or (None,))
    ]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def rows(name: str, dataset: DatasetConfig) -> Sequence[Record]:
    """Return the rows of a split. name: a folder from `save_to_disk`, or a data set that `load_dataset` accepts."""
    folder, split = Path(name), dataset.split or "train"
    if not any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
        return _load(name, dataset.subset, split, dataset.kwargs)
    check_split(name, dataset.subset, split, dataset.kwargs)
    loaded: Any = datasets.load_from_disk(str(folder))
    records: Any = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    return records


def check_split(folder: str, subset: str | None, split: str, kwargs: Mapping[str, Any]) -> None:
    """Raise RecipeError, at data.subset or data.split, if a folder that `rows` can read lacks the subset or the split.

    No records are read. Folders whose layout is not known are accepted. kwargs: the arguments of `load_dataset`.
    """
    if (saved := Path(folder) / "dataset_dict.json").is_file():
        splits: list[str] = json.loads(saved.read_text())["splits"]
    elif (Path(folder) / "state.json").is_file() or {"data_files", "data_dir"} & kwargs.keys():
        return
    else:
        try:
            found = datasets.load.dataset_module_factory(folder).builder_configs_parameters
        except Exception:  # of a folder that load_dataset refuses, which says why
            return
        layout = {config.name: [*map(str, config.data_files or ())] for config in found.builder_configs or ()}
        default = found.default_config_name or (next(iter(layout)) if len(layout) == 1 else None)
        if layout and (subset or default) not in layout:
            message = f"got {subset}; expected a subset of {folder}: {', '.join(layout)}"
            raise RecipeError(Problem("data.subset", "not-a-choice", message))
        splits = layout.get(subset or default or "", [])
    asked = {part.partition("[")[0].strip() for part in split.split("+")}  # such as train[:10%]+test
    if splits and not asked <= {*splits, "all"}:
        message = f"got {split}; expected a split of {folder}: {', '.join(splits)}"
        raise RecipeError(Problem("data.split", "not-a-choice", message))


def data_files(name: str, dataset: DatasetConfig) -> Sequence[str]:
    """Return the data files of a split, in the order of their rows; empty if `name` is not a folder with data files."""
    if not Path(name).is_dir():
        return ()
    options = {"name": dataset.subset, **dataset.kwargs} if dataset.subset else dataset.kwargs
    try:
        files: Any = datasets.load_dataset_builder(name, **options).config.data_files
    except (OSError, ValueError):  # a folder of save_to_disk, say
        return ()
    return (files or {}).get(dataset.split or "train", ())


def _load(name: str, subset: str | None, split: str, kwargs: dict[str, Any]) -> Sequence[Record]:
    """Return a data set from `load_dataset`, which reads the files in the hub cache if there are any.

    Without a network `load_dataset` only finds data sets that it has prepared itself, not those of `hf download`. Raise
    RecipeError if there is no such data set, subset or split.
    """
    source = name if Path(name).is_dir() else _snapshot(name, kwargs.get("revision")) or name
    if source != name:
        kwargs = {key: value for key, value in kwargs.items() if key != "revision"}
    options = {"name": subset, **kwargs} if subset else kwargs
    if Path(source).is_dir():
        check_split(source, subset, split, kwargs)
    try:
        return datasets.load_dataset(source, split=split, **options)
    except (ConnectionError, FileNotFoundError) as error:
        meant = f"; did you mean {close}?" if (close := nearest_dataset(name)) else ""
        message = f"'{name}' is neither a folder nor in the local caches: {error}{meant}"
        raise RecipeError(Problem("data", "unavailable-dataset", message)) from error
    except (ValueError, DatasetGenerationError) as error:
        raise RecipeError(Problem("data", "unavailable-dataset", f"'{name}': {error.__cause__ or error}")) from error


def _snapshot(name: str, revision: str | None) -> str | None:
    """Return the folder of a repository's data files in the hub cache.

    Return None if the cache lacks the repository, or only has files that describe it.
    """
    try:
        folder = huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if any(path.is_file() and path.name not in DATASET_CARDS for path in Path(folder).rglob("*")) else None
