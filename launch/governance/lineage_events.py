"""Record what a run is made from at its submission, and what an export is made from when it is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.governance import export_lineage, inputs, model_card
from launch.runs.run_events import RunObserver
from launch.runs.run_folder import RunFolder
from pipeline.config import Recipe


class AncestryObserver(RunObserver):
    """Writes inputs.json for each run, and lineage.json and the model card for each export."""

    def prepared(self, recipe: Recipe, run_dir: Path) -> list[str]:
        """Write inputs.json, and return a warning for each input file that was rewritten since an earlier submission."""
        return inputs.write(recipe, run_dir)

    def exported(self, run_dir: Path, checkpoint: Path, step: int, form: str, out: Path, receipts: Mapping[str, Any]) -> None:
        """Write lineage.json and the model card into the export. Raises OSError and RecipeError."""
        export_lineage.write(run_dir, checkpoint, step, out, form, receipts.get("audit"))
        (out / model_card.FILE).write_text(model_card.text(RunFolder.at(run_dir), step), encoding="utf-8")


OBSERVER = AncestryObserver()
