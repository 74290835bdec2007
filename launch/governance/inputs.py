"""List the files of a submitted run: models, data, prompts, the user's code, containers, and an evaluated checkpoint.

Only names, sizes and times are read here, so that a submission stays fast; the job hashes the contents
(pipeline/lineage/input_records.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.preflight import model_readings, user_imports
from launch.recipes.model_files import hub_cache, model_folder
from pipeline import config
from pipeline.algorithms.evaluate import TaskDataConfig
from pipeline.config import KINDS, DatasetConfig, Recipe, RecipeError
from pipeline.config.data import NAMED_DATASETS
from pipeline.config.environments import scorers
from pipeline.data import sources
from pipeline.files import small_files
from pipeline.lineage import file_hashes, input_records
from pipeline.lineage.input_records import FOLDER, INPUTS
from pipeline.seams import extras

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of files that identify a model. Other files, such as a tokenizer, are the same in many models."""


def write(recipe: Recipe, run_dir: Path) -> list[str]:
    """Add the inputs of a submission to inputs.json, and give the run an id. Raises OSError.

    Return a warning for each file that was rewritten since an earlier submission.
    """
    input_records.begin(run_dir)
    before = input_records.read_inputs(run_dir).get("inputs", [])
    added = [entry for entry in of_recipe(recipe) if entry not in before]
    audit = extras.find("audit")
    folder = (audit.folder_for(recipe.cluster.audit, run_dir) if audit else None) or run_dir.parent
    small_files.write(run_dir / FOLDER / INPUTS, {"cache": str(file_hashes.cache_path(folder)), "inputs": [*before, *added]})
    earlier = {state.path: state for entry in before for state in input_records.files_of(entry)}
    hashes = dict(file_hashes.read_hashes(run_dir / FOLDER / input_records.HASHES))
    now = [state for entry in added for state in input_records.files_of(entry)]
    changed = [(earlier[state.path], state) for state in now if earlier.get(state.path, state) != state]
    return [file_hashes.rewritten(old, new, hashes.get(old, "")) for old, new in changed]


def of_recipe(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield {"key", "role", "name", "path", "origin", "files"} of each input of a recipe.

    key: the recipe's key of the input. role: model, checkpoint, data, prompt, code or image. name: the key's value. path: the
    file or folder that the name stands for; None if the name is not an absolute path and this machine does not have it. origin,
    files: as `pipeline.lineage.input_records.complete_entry` adds them. A named data set also has "arguments": subset, split
    and kwargs; code has those of an environment. Of the user's code the file of its module is recorded, not what this imports.
    """
    models = config.models(recipe) | config.served_models(recipe)
    for section, policy in models.items():
        if not policy.random_init:
            yield _entry(f"{section}.model_name", "model", policy.model_name, _model(section, policy.model_name))
    if not config.trains(recipe):
        if recipe.evaluate.checkpoint:
            yield _entry("evaluate.checkpoint", "checkpoint", recipe.evaluate.checkpoint, Path(recipe.evaluate.checkpoint))
        for name, task in recipe.evaluate.tasks.items():
            yield from _data(f"evaluate.tasks.{name}.data", task.data)
    else:
        for key, dataset in config.keyed_sets(recipe.data).items():
            yield from _of_dataset(key, dataset)
    for key, path in model_readings.template_files(recipe).items():
        yield _entry(key, "prompt", str(path), path)
    for code in user_imports.code_references(recipe):
        if source := user_imports.source_of(code, recipe):
            yield _entry(code.key, "code", code.path, source, code.kwargs)
    for name, environment in recipe.env.items():
        for scorer in scorers(name, environment):
            if scorer.kind not in KINDS.built_in and scorer.kind in KINDS:  # of an installed package
                path = KINDS[scorer.kind]
                yield _entry(scorer.key, "code", path, user_imports.module_file(path, recipe), scorer.kwargs)
    for name, component in config.components(recipe).items():
        if component.container_image:
            yield _entry(f"cluster.{name}.container_image", "image", component.container_image, Path(component.container_image))


def _of_dataset(key: str, dataset: DatasetConfig) -> Iterator[dict[str, Any]]:
    yield from _data(key, dataset)
    for name in ("prompt_file", "system_prompt_file"):
        if path := getattr(dataset, name):
            yield _entry(f"{key}.{name}", "prompt", path, Path(path))


def _data(key: str, dataset: DatasetConfig | TaskDataConfig) -> Iterator[dict[str, Any]]:
    """Yield the entry of a data set. A generated data set has no files; its name and arguments identify it."""
    name = dataset.dataset_name
    for path in config.data_paths(dataset):
        for file in sources.matches(path) if sources.is_glob(path) else [Path(path)]:
            yield _entry(f"{key}.data_path", "data", str(file), file)
    if name and not dataset.data_path:
        repository = NAMED_DATASETS[name].repository if name in NAMED_DATASETS else name
        local = Path(name) if Path(name).is_dir() else hub_cache() / f"datasets--{repository.replace('/', '--')}" / "snapshots"
        arguments = {part: getattr(dataset, part) for part in ("subset", "split", "kwargs")}
        yield _entry(f"{key}.dataset_name", "data", name, local, arguments)


def _model(section: str, name: str | None) -> Path | None:
    with contextlib.suppress(RecipeError):
        return model_folder(f"{section}.model_name", name) if name else None
    return None


def _entry(
    key: str, role: str, name: str | None, path: Path | None, arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an entry of inputs.json.

    If a file is not here yet, such as the model of a needed run, the job completes the entry.
    """
    is_path = name is not None and os.path.isabs(name)
    local_path = (
        path if path is not None and (is_path or path.exists()) else Path(name) if name is not None and is_path else None
    )
    entry = {"key": key, "role": role, "name": name, "path": local_path and str(local_path), "origin": None, "files": []}
    return input_records.complete_entry(entry | ({"arguments": arguments} if arguments else {}))


# ---- contents -----------------------------------------------------------------------------------------------------------


def is_weights(path: str) -> bool:
    """Return whether a file holds weights, judged by its name."""
    return path.endswith(WEIGHTS)


def content(hashes: Iterable[str]) -> str:
    """Return one SHA-256, in hex, for the content of several files. The order of `hashes` does not matter.

    For a single file, it is the hash of the file itself.
    """
    hashes = list(hashes)
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()
