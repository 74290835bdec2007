"""Dequantize GGUF files, which models of a recipe may name, into Hugging Face checkpoints.

`policy.model_name=PATH.gguf` is a model whose weights llama.cpp has quantized. `pipeline/models/dequantize.py` makes a
checkpoint of it, which stays in a folder beside Hugging Face's cache, so a file is converted once. The recipe of the run names
this folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from launch.recipes.model_files import hf_home
from launch.recipes.trust import Trust, current
from pipeline.config import Loaded, Problem, RecipeError, changed
from pipeline.recipe import user_files
from pipeline.recipe.values import leaves

SUFFIX = ".gguf"
MAGIC = b"GGUF"
CONVERSION_S = 3600.0  # limit of a conversion
NAMES = (".model_name", ".tokenizer.name")
"""Ends of the keys that name a model or a tokenizer."""


def with_folders(loaded: Loaded) -> Loaded:
    """Return a recipe in which the folders of dequantized checkpoints replace the names of GGUF files.

    A file that cannot be converted is a problem of its key.
    """
    named = {
        key: value
        for key, value in leaves(dataclasses.asdict(loaded.recipe))
        if key.endswith(NAMES) and isinstance(value, str) and value.lower().endswith(SUFFIX)
    }
    folders: dict[str, Path] = {}
    problems, faulty, notes = list(loaded.problems), set(loaded.faulty), list(loaded.notes)
    for key, value in named.items():
        if value in folders or key in faulty:
            continue
        try:
            folders[value] = checkpoint_folder(key, Path(value).expanduser())
            notes.append(f"{key}: {value} is dequantized to bfloat16 in {folders[value]}")
        except RecipeError as error:
            problems += error.problems
            faulty |= {other for other, name in named.items() if name == value}
    values = {key: str(folders[value]) for key, value in named.items() if value in folders}
    if not named:
        return loaded
    recipe = changed(loaded.recipe, values) if values and not problems else loaded.recipe
    return dataclasses.replace(loaded, recipe=recipe, problems=problems, faulty=frozenset(faulty), notes=notes)


def checkpoint_folder(key: str, path: Path) -> Path:
    """Return the folder of the Hugging Face checkpoint that a GGUF file holds. Converts the file if nobody has.

    key: the recipe's key that names the file. Raises RecipeError.
    """
    try:
        with user_files.open_file(path) as file:
            is_gguf, state = file.read(len(MAGIC)) == MAGIC, os.fstat(file.fileno())
    except OSError as error:
        raise RecipeError(Problem(key, "file-not-found", f"{path} cannot be read: {error.strerror}")) from None
    if not is_gguf:
        raise RecipeError(Problem(key, "bad-format", f"got {path}, which is no GGUF file: it does not begin with GGUF"))
    identity = json.dumps([str(path.resolve()), state.st_size, state.st_mtime_ns])
    folder = hf_home() / "hetstep" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    if current(dry=True) is Trust.NOTHING:
        message = (
            f"got {path}, which is not dequantized yet. Try `python launch/submit.py ... {key}={path}` on the command line"
        )
        raise RecipeError(Problem(key, "unsupported", message))
    if find_spec("gguf") is None:
        message = f"got {path}, which the package gguf reads; it is not installed. Try `pip install '.[gguf]'`"
        raise RecipeError(Problem(key, "not-installed", message))
    print(f"{key}: dequantizing {path} to {folder}", file=sys.stderr, flush=True)
    _convert_in_process(key, path, folder)
    return folder


def _convert_in_process(key: str, path: Path, folder: Path) -> None:
    """Convert in a process of its own: submission stays without torch. The folder appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / "checkpoint"
        command = [sys.executable, "-m", "pipeline.models.dequantize", str(path.resolve()), str(target)]
        root = Path(__file__).resolve().parents[2]
        try:
            ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=CONVERSION_S)
        except subprocess.TimeoutExpired:
            message = f"got {path}, whose conversion takes more than {CONVERSION_S:g} s. Try a checkpoint of Hugging Face"
            raise RecipeError(Problem(key, "unavailable-model", message)) from None
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise RecipeError(Problem(key, "bad-format", f"got {path}, which transformers cannot convert: {last}"))
        try:
            target.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # otherwise another process has made it meanwhile
                raise RecipeError(Problem(key, "unreadable", f"{folder} cannot be made: {error.strerror}")) from None
