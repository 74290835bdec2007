"""Write what a run and its exports are made from, as they are submitted and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.governance import export_lineage, inputs, model_card
from launch.runs.run_events import RunObserver
from launch.runs.run_folder import RunFolder
from pipeline.config import Recipe


class AncestryObserver(RunObserver):
    """Writes inputs.json of a run; lineage.json and the model card of an export."""

    def prepared(self, recipe: Recipe, run_dir: Path) -> list[str]:
        """Return a warning for each input that was rewritten since an earlier submission."""
        return inputs.write(recipe, run_dir)

    def exported(self, run_dir: Path, checkpoint: Path, step: int, form: str, out: Path, receipts: Mapping[str, Any]) -> None:
        """Write both files into the export. Raises OSError and RecipeError."""
        export_lineage.write(run_dir, checkpoint, step, out, form, receipts.get("audit"))
        (out / model_card.FILE).write_text(model_card.text(RunFolder.at(run_dir), step), encoding="utf-8")


OBSERVER = AncestryObserver()
