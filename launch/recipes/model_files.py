"""Find a model's files and read its config.json, without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import PolicyConfig, Problem, RecipeError, collected, refuse
from pipeline.models import config_values, rope
from pipeline.models.config_overrides import overridden
from pipeline.models.config_values import ALIASES, MULTIMODAL
from pipeline.recipe import user_files

KNOWN = Path(__file__).resolve().parents[2] / "recipes/models"
"""Folder of the files ORG/NAME.json, each with the keys of a public model's config.json that a plan needs. The key `like` names
another model, whose keys are inherited."""


class ModelNotFound(RecipeError):
    """Raised if a model is neither a folder nor in the Hugging Face cache of this machine."""


@dataclass(frozen=True)
class PendingModel(os.PathLike):
    """The folder of a needed run that has not run yet, and the model that it will train and write there."""

    folder: Path
    policy: PolicyConfig
    head: str = "logprobs"  # or "values", of a reward model

    def output_config(self, initial: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of the model that the run writes. initial: the config.json of its initial model."""
        if self.head == "logprobs":
            return initial
        kinds = [
            kind.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification") for kind in initial["architectures"]
        ]
        return {**initial, "architectures": [f"{kind}ForSequenceClassification" for kind in kinds], "num_labels": 1}

    def __fspath__(self) -> str:
        return str(self.folder)


def model_config(
    policy: PolicyConfig, pending: Sequence[os.PathLike] = (), key: str = "policy.model_name"
) -> dict[str, Any] | None:
    """Return a model's config.json with the recipe's overrides; None if a pending run will write the model.

    For a multimodal family, the keys of the language model (`text_config`) are merged in, and the key MULTIMODAL has the whole
    file. pending: the folders of needed runs that have not run yet. key: the recipe's key of the model's name. Raises
    RecipeError.
    """
    if is_inside(policy.model_name, pending):
        return None
    return _language_model_config(read_json(model_folder(key, policy.model_name) / "config.json"), policy, key)


def planning_config(
    policy: PolicyConfig, pending: Sequence[os.PathLike] = (), key: str = "policy.model_name"
) -> dict[str, Any] | None:
    """Return the config.json of a model as `model_config` does, but also for models that are not on this machine yet.

    A plan needs no more of a model. For a public model that is not on this machine, return its description in recipes/models.
    For a model that a pending run will write, return the config.json that this run will write. Raises RecipeError.
    """
    for run in pending:
        if isinstance(run, PendingModel) and is_inside(policy.model_name, [run]):
            with collected([]):  # the needed recipe has reported the problems of its model
                initial = planning_config(run.policy, [model for model in pending if model is not run])
                return initial and _language_model_config(run.output_config(initial), policy, key)
            return None
    if (
        not is_inside(policy.model_name, pending)
        and not is_local(policy.model_name)
        and (config := public_model_config(policy.model_name))
    ):
        return _language_model_config(config, policy, key)
    return model_config(policy, pending, key)


def _language_model_config(config: dict[str, Any], policy: PolicyConfig, key: str) -> dict[str, Any]:
    overrides = f"{key.removesuffix('model_name')}hf_config_overrides"
    refuse(_type_problems(overrides, policy.hf_config_overrides, config))
    config = overridden(config, policy.hf_config_overrides, overrides)
    if isinstance(text := config.get("text_config"), dict):
        config = {**config, **text, MULTIMODAL: config.get(MULTIMODAL, config)}
    changed = [name for name in rope.SPELLINGS if name in policy.hf_config_overrides]
    refuse(config_values.problems(f"{overrides}.{changed[0]}" if changed else key, config))
    kind = config.get("model_type")
    return {**config, "model_type": ALIASES[kind]} if kind in ALIASES else config


def _type_problems(key: str, overrides: dict[str, Any], config: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each override whose type differs from the type of the value in config.json."""

    def kind(x: Any) -> str:
        return "number" if isinstance(x, int | float) and not isinstance(x, bool) else type(x).__name__

    for name, value in overrides.items():
        default = config.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            yield from _type_problems(f"{key}.{name}", value, default)
        elif value is not None and default is not None and kind(value) != kind(default):
            yield Problem(f"{key}.{name}", "wrong-type", f"got {value!r}; expected the same type as {default!r} in config.json")


def public_model_config(name: str) -> dict[str, Any] | None:
    """Return the description in recipes/models of a model on the Hugging Face Hub; None if there is none. name: ORG/NAME."""
    path = KNOWN / f"{name}.json"
    if name.count("/") != 1 or not os.path.isfile(path):
        return None
    config = read_json(path)
    base = config.pop("like", None)
    return {**(public_model_config(base) or {}), **config} if base else config


def described(name: str | None) -> dict[str, Any] | None:
    """Return the keys of a language model's config.json, from its folder, the Hugging Face cache or recipes/models.

    None if none of them has it, or without a name.
    """
    if name is None:
        return None
    if (folder := Path(name) if os.path.isdir(name) else _in_cache(name)) is None:
        config = public_model_config(name)
    else:
        config = read_json(folder / "config.json") if os.path.isfile(folder / "config.json") else None
    return None if config is None else {**config, **config.get("text_config", {})}


def is_inside(name: str, folders: Iterable[os.PathLike]) -> bool:
    """Return whether a path lies in one of the folders."""
    return any(Path(name).absolute().is_relative_to(Path(folder).absolute()) for folder in folders)


EXAMPLES = "a folder that exists, such as the hf/ that a run saved, or a model's name on the Hugging Face Hub, ORG/NAME"


def is_local(name: str) -> bool:
    """Return whether a model is a folder of this machine or in its Hugging Face cache. A folder without permission is none."""
    return os.path.isdir(name) or _in_cache(name) is not None


def model_folder(key: str, name: str) -> Path:
    """Return a model's folder: `name` itself, or the model's snapshot in the Hugging Face cache.

    key: the recipe's key of the model's name. Raises RecipeError.
    """
    if os.path.isdir(name):
        if not os.path.exists(Path(name) / "config.json") and key.endswith("model_name"):
            message = f"{name} has no config.json; expected a folder with a Hugging Face checkpoint"
            raise RecipeError(Problem(key, "file-not-found", message))
        return Path(name)
    if snapshot := _in_cache(name):
        return snapshot
    if _looks_like_path(name):
        raise ModelNotFound(Problem(key, "file-not-found", f"there is no folder {name}. Try {EXAMPLES}"))
    message = f"'{name}' is neither a folder nor in the cache {hub_cache()}. Try `hf download {name}`"
    message += f", or {key}=MODEL for the tokenizer of another model" if key.endswith(".tokenizer.name") else ""
    raise ModelNotFound(Problem(key, "unavailable-model", message))


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") != 1


def hub_cache() -> Path:
    """Return the folder of the cache as huggingface_hub does: HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub."""
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub").expanduser()


def hf_home() -> Path:
    """Return HF_HOME, or else its default, as huggingface_hub does."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def _in_cache(name: str) -> Path | None:
    """Return the cached snapshot of the revision `main`, which transformers reads; None if it has no config.json."""
    if _looks_like_path(name):
        return None
    snapshot = hub_snapshot("models", name)
    return snapshot if snapshot and os.path.exists(snapshot / "config.json") else None


def hub_snapshot(kind: str, repository: str, revision: str | None = None) -> Path | None:
    """Return the folder of a repository's files in the hub's cache; None if it is not there.

    kind: models or datasets. revision: the revision's hash; None for `main`.
    """
    folder = hub_cache() / f"{kind}--{repository.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (revision or user_files.read_text(folder / "refs/main", 1024).strip())
    except (OSError, ValueError):
        return None
    return snapshot if os.path.isdir(snapshot) else None


def read_json(path: Path, most: int = user_files.MAX_TEXT) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most` bytes. Raises RecipeError if the file holds anything else."""
    try:
        content = json.loads(user_files.read_text(path, most))
    except OSError as error:
        raise RecipeError(Problem(str(path), "unreadable", f"cannot be read: {error.strerror}")) from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(Problem(str(path), "bad-format", f"not JSON: {error}")) from None
    if not isinstance(content, dict):
        message = f"got a JSON {type(content).__name__}; expected an object. Try to download the file again"
        raise RecipeError(Problem(str(path), "bad-format", message))
    return content
