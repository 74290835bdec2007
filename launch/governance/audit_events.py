"""Write the events of runs into the audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from launch.governance import audit_log
from launch.governance.audit_log import folder_for
from launch.runs.run_events import RunObserver
from pipeline.config import Recipe, RecipeError


class AuditObserver(RunObserver):
    """Appends a line to the audit log for each event: before the event where it can still be refused, else after it."""

    def submitting(self, recipe: Recipe, run_dir: Path, executor: str, origin: Mapping[str, Any]) -> dict[str, Any]:
        """Record a submission, and return {"audit": its receipt} for the manifest; the receipt is None without a log.

        Raises RecipeError if the line cannot be written.
        """
        folder = folder_for(recipe.cluster.audit, run_dir)
        if folder is None:
            return {"audit": None}
        git = origin["git"] or {}
        details = {
            "recipe": recipe.name,
            "algorithm": recipe.algorithm,
            "executor": executor,
            "recipe_sha256": origin["recipe"],
            "commit": git.get("commit"),
            "diff": git.get("diff"),
        }
        return {"audit": audit_log.as_record(audit_log.record("submit", run_dir, details, folder))}

    def submitted(self, recipe: Recipe, run_dir: Path, job: str, job_id: str) -> None:
        """Record the job id of a submission. Raises RecipeError if the line cannot be written."""
        if folder := folder_for(recipe.cluster.audit, run_dir):
            audit_log.record("submitted", run_dir, {"job": job, "job_id": job_id}, folder)

    def ending(self, action: Literal["cancel", "stop_and_save"], run_dir: Path, job: str, job_id: str, state: str) -> None:
        """Record that a job is about to be cancelled or stopped. Raises RecipeError if the line cannot be written."""
        audit_log.record(action, run_dir, {"job": job, "job_id": job_id, "state": state})

    def changing(self, run_dir: Path, values: Mapping[str, Any]) -> None:
        """Record new values for keys of a live run. Raises RecipeError if the line cannot be written."""
        audit_log.record("change", run_dir, {"values": values})

    def exporting(self, run_dir: Path, step: int, form: str, out: Path) -> dict[str, Any]:
        """Record an export, and return {"audit": its receipt}. Raises RecipeError if the line cannot be written."""
        details = {"step": step, "format": form, "out": str(out)}
        return {"audit": audit_log.as_record(audit_log.record("export", run_dir, details))}

    def refused(self, run_dir: Path, why: list[str], audit: str | None) -> None:
        """Record that an access was refused, with the reasons. Does nothing if the log cannot be written.

        audit: the value of `cluster.audit`; None: the value in the run's recipe. Often the log cannot be written for the same
        reason for which the access was refused.
        """
        root = audit_log.folder_of(run_dir) if audit is None else folder_for(audit, run_dir)
        if root:
            with contextlib.suppress(RecipeError):
                audit_log.record("refuse", run_dir, {"why": why}, root)

    def variables(self) -> dict[str, str]:
        """Return the environment variable that names the user of the REST service -> that user; {} outside its requests."""
        return audit_log.variables()


OBSERVER = AuditObserver()
