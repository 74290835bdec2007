"""Find a model's files and read its config.json, without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import PolicyConfig, Problem, RecipeError, collected, refuse

KNOWN = Path(__file__).resolve().parent.parent / "recipes/models"
"""Folder of ORG/NAME.json: what a plan needs of the config.json of public models. `like` in one of them names another, whose
keys it has but for those that it says itself."""


class ModelNotFound(RecipeError):
    """A model is neither in its folder nor in the cache of this machine."""


@dataclass(frozen=True)
class PendingModel(os.PathLike):
    """The folder of a needed run that has not run yet, and the model that it will train and leave there."""

    folder: Path
    policy: PolicyConfig
    head: str = "logprobs"  # or "values", of a reward model

    def leaves(self, begun: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of the model that the run leaves, which began with that of `begun`."""
        if self.head == "logprobs":
            return begun
        kinds = [kind.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification") for kind in begun["architectures"]]
        return {**begun, "architectures": [f"{kind}ForSequenceClassification" for kind in kinds], "num_labels": 1}

    def __fspath__(self) -> str:
        return str(self.folder)


def model_config(
    policy: PolicyConfig, pending: Sequence[os.PathLike] = (), key: str = "policy.model_name"
) -> dict[str, Any] | None:
    """Return config.json with the recipe's overrides; None if the model is yet to come out of one of the folders `pending`.

    Multimodal families keep the language model's keys in `text_config`; those are taken. key: where the recipe names the model.
    Raises RecipeError.
    """
    if is_inside(policy.model_name, pending):
        return None
    return _of_language_model(read_json(model_folder(key, policy.model_name) / "config.json"), policy, key)


def planning_config(
    policy: PolicyConfig, pending: Sequence[os.PathLike] = (), key: str = "policy.model_name"
) -> dict[str, Any] | None:
    """Return the same as `model_config`; of a public model that is not on this machine, the description in recipes/models.

    Of a model that a needed run is yet to leave, return what that run begins with. For the plan alone: a run needs the model
    itself. Raises RecipeError.
    """
    for run in pending:
        if isinstance(run, PendingModel) and is_inside(policy.model_name, [run]):
            with collected([]):  # what is wrong with its model has been told of the needed recipe
                begun = planning_config(run.policy, [other for other in pending if other is not run])
                return begun and _of_language_model(run.leaves(begun), policy, key)
            return None
    if (
        not is_inside(policy.model_name, pending)
        and not is_local(policy.model_name)
        and (config := public_model_config(policy.model_name))
    ):
        return _of_language_model(config, policy, key)
    return model_config(policy, pending, key)


def _of_language_model(config: dict[str, Any], policy: PolicyConfig, key: str) -> dict[str, Any]:
    refuse(_other_types(f"{key.removesuffix('model_name')}hf_config_overrides", policy.hf_config_overrides, config))
    config = config | policy.hf_config_overrides
    return config | (config.get("text_config") or {})


def _other_types(key: str, given: dict[str, Any], config: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each override that is of another type than what it overrides."""

    def kind(x: Any) -> str:
        return "number" if isinstance(x, int | float) and not isinstance(x, bool) else type(x).__name__

    for name, value in given.items():
        there = config.get(name)
        if isinstance(value, dict) and isinstance(there, dict):
            yield from _other_types(f"{key}.{name}", value, there)
        elif value is not None and there is not None and kind(value) != kind(there):
            yield Problem(f"{key}.{name}", "wrong-type", f"got {value!r}; expected the type of {there!r}, as in config.json")


def public_model_config(name: str) -> dict[str, Any] | None:
    """Return the description in recipes/models of a public model, by its name on the Hugging Face Hub; None without one."""
    path = KNOWN / f"{name}.json"
    if name.count("/") != 1 or not path.is_file():
        return None
    config = read_json(path)
    other = config.pop("like", None)
    return {**public_model_config(other), **config} if other else config


def is_inside(name: str, folders: Iterable[os.PathLike]) -> bool:
    return any(Path(name).absolute().is_relative_to(Path(folder).absolute()) for folder in folders)


def is_local(name: str) -> bool:
    """Return whether the model is a folder or in the Hugging Face cache."""
    return Path(name).is_dir() or _in_cache(name) is not None


def model_folder(key: str, name: str) -> Path:
    """Return the folder that a model's name stands for: itself, or a snapshot in the Hugging Face cache. Raises RecipeError."""
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists() and key.endswith("model_name"):
            told = f"{name} has no config.json; expected a folder with a Hugging Face checkpoint"
            raise RecipeError(Problem(key, "file-not-found", told))
        return Path(name)
    if snapshot := _in_cache(name):
        return snapshot
    if _looks_like_path(name):
        raise ModelNotFound(Problem(key, "file-not-found", f"there is no folder {name}"))
    told = f"'{name}' is neither a folder nor in the cache {hub_cache()}. Try `hf download {name}`"
    raise ModelNotFound(Problem(key, "unavailable-model", told))


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") != 1


def hub_cache() -> Path:
    """Return the cache as huggingface_hub finds it: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub").expanduser()


def hf_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def _in_cache(name: str) -> Path | None:
    """Return the snapshot of `main` that has a config.json, else the newest that has one."""
    if _looks_like_path(name):
        return None
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    main = repository / "refs/main"
    snapshots = sorted(repository.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    if main.exists():
        snapshots.insert(0, repository / "snapshots" / main.read_text().strip())
    return next((snapshot for snapshot in snapshots if (snapshot / "config.json").exists()), None)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise RecipeError(Problem(str(path), "bad-format", f"not JSON: {error}")) from None
    if not isinstance(found, dict):
        told = f"got a JSON {type(found).__name__}; expected an object. Try to fetch it again"
        raise RecipeError(Problem(str(path), "bad-format", told))
    return found
