"""Check by names, sizes and headers that a model's files are all present and complete.

Leaves out: the weights' bytes, so a file damaged without a change of length passes; and whether the tensors match config.json,
which the job checks first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from launch.model_files import is_inside, model_folder
from pipeline import config, user_files
from pipeline.config import Problem, Recipe, RecipeError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
SHOWN = 4  # bad files reported per model
ABSENT = ("is missing", "is a link", "is a git-annex link", "has not been downloaded")
MOST_HEADER = 100_000_000  # bytes, the limit of safetensors


def problems(recipe: Recipe, pending: Sequence[os.PathLike] = ()) -> Iterator[Problem]:
    """Yield incomplete files; `architecture` and `input_files` report missing folders.

    pending: models of needed runs that are still to be written, which are not checked.
    """
    seen: set[Path] = set()
    weighed: set[Path] = set()  # folders checked; another model of the same folder may have random_init
    models = config.models(recipe) | config.served_models(recipe)
    names = {f"{section}.model_name": policy.model_name for section, policy in models.items()}
    names["policy.tokenizer.name"] = recipe.policy.tokenizer.name
    if environment := config.reward_environment(recipe):
        names[f"env.{environment}.tokenizer.name"] = config.reward_model_policy(recipe).tokenizer.name
    for key, name in names.items():
        if not (folder := _folder(key, name, pending)):
            continue
        if folder not in seen:
            seen.add(folder)
            present = [folder / name for name in OTHER_FILES if os.path.lexists(folder / name)]
            yield from (
                Problem(key, fault_code(reason), f"{path} {reason}") for path in present if (reason := file_fault(path))
            )
        section = key.removesuffix(".model_name")
        loaded = section in models and not models[section].random_init
        if loaded and folder not in weighed and not (section == "policy" and _has_checkpoint(recipe)):
            weighed.add(folder)
            yield from _check_weights(section, folder)


def _has_checkpoint(recipe: Recipe) -> bool:
    """Return whether all of the policy's weights are those of a run's checkpoint, which may have adapters alone."""
    adapters = recipe.policy.dtensor_cfg.lora_cfg.enabled or recipe.policy.megatron_cfg.peft.enabled  # of the run
    return not config.trains(recipe) and recipe.evaluate.checkpoint is not None and not adapters


def _folder(key: str, name: str | None, pending: Sequence[os.PathLike]) -> Path | None:
    """Return a model's folder; None if a run is still to write it, or if it is missing, which other checks report."""
    if not name or is_inside(name, pending):
        return None
    try:
        return model_folder(key, name)
    except RecipeError:
        return None


def fault_code(reason: str) -> str:
    """Return the code of a fault that `file_fault` returns."""
    return "file-not-found" if reason.startswith(ABSENT) else "unreadable"


def _check_weights(section: str, folder: Path) -> Iterator[Problem]:
    key = f"{section}.model_name"
    if not os.path.lexists(folder / SINGLE) and not os.path.lexists(folder / INDEX):
        random = f", or {section}.random_init=true to start from random ones" if section in ("policy", "value") else ""
        if any(folder.glob("pytorch_model*.bin")):
            what = f"{folder} has weights as pytorch_model*.bin only, which are pickles. Try safetensors{random}"
            yield Problem(key, "unsupported", what)
        else:
            what = f"{folder} has no weights ({SINGLE} or {INDEX}). Try to fetch the whole checkpoint{random}"
            yield Problem(key, "file-not-found", what)
        return
    found = read_stored_weights(folder)
    found_problems = [Problem(key, fault_code(reason), f"{folder / name} {reason}") for name, reason in found.faults.items()]
    yield from found_problems[:SHOWN]
    if len(found_problems) > SHOWN:
        what = f"{folder}: so are {len(found_problems) - SHOWN} more of its {found.files} weight files; fetch it again"
        yield Problem(key, "unreadable", what)


# ---- files on disk ------------------------------------------------------------------------------------------------------


@dataclass
class StoredWeights:
    """The weights in a folder."""

    files: int = 0  # expected number of weight files
    parameters: int = 0
    nbytes: int = 0  # of all tensors
    faults: dict[str, str] = field(default_factory=dict)  # file name -> fault


def read_stored_weights(folder: Path) -> StoredWeights:
    """Read the headers of all weight files of a folder."""
    found = StoredWeights()
    listed: dict[str, list[str]] = {SINGLE: []}  # file -> its tensors according to the index
    if not os.path.lexists(folder / SINGLE):
        if reason := file_fault(folder / INDEX):
            found.faults[INDEX] = reason
            return found
        try:
            weight_map = json.loads(user_files.read_text(folder / INDEX, user_files.MAX_JSON))["weight_map"]
        except (ValueError, KeyError, TypeError):
            found.faults[INDEX] = "is not an index of weight files: it has no JSON object with 'weight_map'; fetch it again"
            return found
        listed = {}
        for tensor, name in weight_map.items():
            listed.setdefault(name, []).append(tensor)
    found.files = len(listed)
    for name, tensors in sorted(listed.items()):
        try:
            header = read_header(folder / name)
        except ValueError as error:
            found.faults[name] = str(error)
            continue
        if absent := [tensor for tensor in tensors if tensor not in header]:
            found.faults[name] = (
                f"lacks {len(absent)} of its {len(tensors)} tensors in the index, first {absent[0]}; index and"
                " weights are of different downloads: fetch them again"
            )
        found.parameters += sum(prod(entry["shape"]) for entry in header.values())
        found.nbytes += max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return found


def read_header(path: Path) -> dict[str, dict]:
    """Return {"dtype", "shape", "data_offsets"} of each tensor of a safetensors file, by name.

    The file has 8 bytes with the header's length, the header, and the data (https://github.com/huggingface/safetensors,
    "Format"). Raises ValueError with the fault of the file.
    """
    if reason := file_fault(path):
        raise ValueError(reason)
    size = path.stat().st_size
    with user_files.open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER or size < 8:
            raise ValueError("is no safetensors file; fetch it again")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"is cut off: it has {size} bytes, and its header alone {8 + length}; fetch it again")
    try:
        header = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("is no safetensors file; fetch it again") from None
    if size < end:
        raise ValueError(f"is cut off: it has {size:,} of {end:,} bytes; fetch it again")
    if size > end:
        raise ValueError(f"has {size - end:,} bytes more than its header says; fetch it again")
    return header


def file_fault(path: Path) -> str | None:
    """Return why a file is not a complete copy; None if it can be read."""
    try:
        with user_files.open_file(path) as file:
            start = file.read(64)
    except FileNotFoundError:
        return _why_absent(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file; `git lfs pull` there fetches it"
    if start.startswith(b"/annex/objects/"):
        return "is a git-annex pointer, not the file; `git annex get` there fetches it"
    return None if start else "is empty; fetch it again"


def _why_absent(path: Path) -> str:
    target = path.resolve()
    places = (target.parent.glob(f"{target.name}*.incomplete"), path.parent.glob(f".cache/huggingface/download/{path.name}*"))
    if any(partial.suffix == ".incomplete" for place in places for partial in place):
        return "has not been downloaded to its end (there is an .incomplete file); fetch it again"
    if path.is_symlink():
        if "annex" in target.parts or ".git" in target.parts:
            return "is a git-annex link without its content; `git annex get` there fetches it"
        return f"is a link to {target}, which is not there; fetch it again"
    return "is missing; fetch it again"
