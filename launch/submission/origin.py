"""Say where the results of a submission come from: its code, its recipe and its container images."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from launch.executors.executor import JobStatus, RunJob
from launch.runs import audit_log
from launch.runs.code_state import code_state
from pipeline import config
from pipeline.config import Recipe

DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


def of_submission(recipe: Recipe) -> dict[str, Any]:
    """Return {"git", "recipe", "images"} for the manifest, each None or {} where there is none.

    recipe: SHA-256, in hex, of the resolved recipe as recipe.yaml holds it. images: {"image", "digest"} by component, and
    "size", "mtime_ns" of an image that is a file; its content is hashed in the job (pipeline/files/input_records.py).
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
    found: dict[str, Any] = {"image": image, "digest": digest[1] if digest else None}
    try:
        status = os.stat(image)
    except OSError:  # a registry's, or a file that only nodes see
        return found
    return found | {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


# ---- lines of the audit log ---------------------------------------------------------------------------------------------


def record_submission(recipe: Recipe, run_dir: Path, executor: str, origin: dict[str, Any]) -> dict[str, Any] | None:
    """Record that a recipe is about to be submitted, and return the receipt for the manifest; None without a log.

    origin: of `of_submission`. Raises RecipeError if the line cannot be written.
    """
    folder = audit_log.folder_for(recipe.cluster.audit, run_dir)
    if folder is None:
        return None
    git = origin["git"] or {}
    details = {
        "recipe": recipe.name,
        "algorithm": recipe.algorithm,
        "executor": executor,
        "recipe_sha256": origin["recipe"],
        "commit": git.get("commit"),
        "diff": git.get("diff"),
    }
    return audit_log.as_record(audit_log.record("submit", run_dir, details, folder))


def record_job(recipe: Recipe, run_dir: Path, job: RunJob) -> None:
    """Record the job of a submission. Raises RecipeError if the line cannot be written."""
    if folder := audit_log.folder_for(recipe.cluster.audit, run_dir):
        audit_log.record("submitted", run_dir, {"job": job.name(), "job_id": job.job_id}, folder)


def record_end(action: audit_log.Action, run_dir: Path, job: RunJob, status: JobStatus) -> None:
    """Record that a job is about to be cancelled or stopped. Raises RecipeError if the line cannot be written."""
    audit_log.record(action, run_dir, {"job": job.name(), "job_id": job.job_id, "state": status.state})
