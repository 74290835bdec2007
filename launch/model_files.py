"""Where a model's files are, and its config.json, without transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pipeline.config import PolicyConfig, RecipeError


def model_config(policy: PolicyConfig, pending: list[Path] = (), key: str = "policy.model_name") -> dict[str, Any] | None:
    """config.json with the recipe's overrides; None if the model is yet to come out of one of the run folders `pending`.

    Multimodal families keep the language model's keys in `text_config`; those are taken. key: where the recipe names the model.
    Raises RecipeError.
    """
    if inside(policy.model_name, pending):
        return None
    config = read_json(model_folder(key, policy.model_name) / "config.json")
    config |= policy.hf_config_overrides
    return config | config.get("text_config", {})


def inside(name: str, folders: list[Path]) -> bool:
    return any(Path(name).absolute().is_relative_to(folder.absolute()) for folder in folders)


def model_folder(key: str, name: str) -> Path:
    """The folder that a model's name stands for: itself, or a snapshot in the Hugging Face cache. Raises RecipeError."""
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists() and key.endswith("model_name"):
            raise RecipeError(f"{key}: {name} has no config.json; give a folder with a Hugging Face checkpoint")
        return Path(name)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if not looks_like_path and (snapshot := _cached(hub_cache() / f"models--{name.replace('/', '--')}")):
        return snapshot
    if looks_like_path:
        raise RecipeError(f"{key}: there is no folder {name} (looked from {os.getcwd()})")
    raise RecipeError(
        f"{key}: '{name}' is neither a folder (looked from {os.getcwd()}) nor in the cache {hub_cache()}; fetch it with"
        f" `hf download {name}`"
    )


def hub_cache() -> Path:
    """As huggingface_hub finds it: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub").expanduser()


def hf_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def _cached(repository: Path) -> Path | None:
    """The snapshot of `main`, else the only ones there are, newest first, if it has a config.json."""
    main = repository / "refs/main"
    snapshots = sorted(repository.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    if main.exists():
        snapshots.insert(0, repository / "snapshots" / main.read_text().strip())
    return next((snapshot for snapshot in snapshots if (snapshot / "config.json").exists()), None)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise RecipeError(f"{path}: not JSON: {error}") from None
