"""Identify the origin of a submission's results: its code, its recipe and its container images."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

from launch.runs.code_state import code_state
from pipeline import config
from pipeline.config import Recipe

DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


def of_submission(recipe: Recipe) -> dict[str, Any]:
    """Return {"git", "recipe", "images"} for the manifest.

    git: the result of `code_state`, None outside a Git checkout. recipe: SHA-256, in hex, of the resolved recipe as recipe.yaml
    holds it. images: component's name -> {"image", "digest"}, and also "size" and "mtime_ns" if the image is a file; {} without
    images. The job hashes the content of such a file (pipeline/lineage).
    """
    resolved = hashlib.sha256(config.to_yaml(recipe).encode()).hexdigest()
    images = {
        name: _image(component.container_image)
        for name, component in config.components(recipe).items()
        if component.container_image
    }
    return {"git": code_state(), "recipe": resolved, "images": images}


def _image(image: str) -> dict[str, Any]:
    digest = DIGEST.search(image)
    record: dict[str, Any] = {"image": image, "digest": digest[1] if digest else None}
    if not os.path.isfile(image):  # a registry's, a sandbox folder, or a file that only nodes see
        return record
    status = os.stat(image)
    return record | {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
