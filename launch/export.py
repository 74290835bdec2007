"""Export a checkpoint of a run in Hugging Face format: `python launch/export.py run=RUN_DIR [step=N] [out=DIR] [adapter=true]`.

Writes what transformers and vLLM load: sharded safetensors in policy.precision, config, tokenizer and chat template. Also
writes a model card (README.md) with the run's evaluations of that step, and lineage.json, which records what the model was made
from. A reward model (algorithm rm) becomes a sequence classifier with one label. Adapters are merged; adapter=true writes them
alone instead, as peft and vLLM load them. The checkpoint is read on this machine, without a GPU or a job; any backend and any
number of ranks may have written it. An export is not encrypted, so the export of an encrypted run needs out=DIR.

Exit status: 0 if the checkpoint was written; 2 if the command line, the run, its checkpoint or the disk has an error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.runs import run_events, run_keys
from launch.runs.run_folder import read_recipe
from launch.terminal import command_line
from launch.terminal.command_line import Key
from pipeline.algorithms import build
from pipeline.checkpoints import checkpoint as checkpoints
from pipeline.checkpoints import verification
from pipeline.checkpoints.checkpoint import Checkpoint, Checkpoints
from pipeline.config import Problem, Recipe, RecipeError
from pipeline.files.storage import StorageError


@dataclass(frozen=True)
class ExportRequest:
    """The command line."""

    run: Annotated[Path, Key("RUN_DIR", "the run's folder; the run may still be active", bare=True)]
    step: Annotated[int | None, Key("N", "step of the checkpoint; default: the latest")] = None
    out: Annotated[Path | None, Key("DIR", "a new folder for the export; default: RUN_DIR/hf_step_N, or adapter_step_N")] = None
    adapter: Annotated[bool, Key("true", "write the adapters of the checkpoint alone, in peft's format")] = False


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, ExportRequest, execute, arguments)


def execute(request: ExportRequest) -> int:
    """Export, and print the folder. Raises RecipeError."""
    print(f"written: {export(request)}")
    return 0


def export(request: ExportRequest) -> Path:
    """Write the checkpoint and return its folder.

    Raises RecipeError if the run or the step does not exist, if the output folder exists already, or if the checkpoint does not
    match the model.
    """
    recipe = read_recipe(request.run)
    try:
        with run_events.refusals(request.run):
            return _export(request, recipe)
    except (ValueError, StorageError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(Problem("run", "unreadable", str(error))) from error


def _export(request: ExportRequest, recipe: Recipe) -> Path:
    checkpoint = _checkpoint(request.run, recipe, request.step)
    if checkpoint.fingerprint and request.out is None:
        message = f"got none; expected out=DIR, because {checkpoint.folder} is encrypted, and an export is not"
        raise RecipeError(Problem("out", "missing-value", message))
    folder = request.out or request.run / f"{'adapter' if request.adapter else 'hf'}_step_{checkpoint.step}"
    if folder.exists():
        raise RecipeError(
            Problem("out", "already-exists", f"{folder} exists already. Try to remove it, or out=DIR with another folder")
        )
    # Imported late, because they import torch, and a wrong command line fails fast.
    from pipeline.models.hugging_face import model_config

    if request.adapter:
        from pipeline.train.adapters.peft_files import export_adapters as write
    else:
        from pipeline.train.hf_export import export_checkpoint as write
    head = build(recipe).needs.head
    try:
        model_config(recipe.policy, head)
    except OSError as error:
        why = f"{error} (relative paths start at {Path.cwd()})"
        raise RecipeError(Problem("policy.model_name", "unavailable-model", why)) from error
    key = run_keys.key_of(request.run) if checkpoint.fingerprint else None
    verification.check_record(checkpoint, recipe.checkpointing.verify, key)
    verification.check_share(checkpoint, recipe.checkpointing.verify)
    form = "adapter" if request.adapter else "hf"
    receipts: dict[str, Any] = {}
    for values in run_events.emit(lambda observer: observer.exporting(request.run, checkpoint.step, form, folder)):
        receipts |= values
    write(checkpoint.folder, recipe.policy, folder, head, key)
    step, source = checkpoint.step, checkpoint.folder
    run_events.emit(lambda observer: observer.exported(request.run, source, step, form, folder, receipts))
    return folder


def _checkpoint(run_dir: Path, recipe: Recipe, step: int | None) -> Checkpoint:
    complete = {checkpoint.step: checkpoint for checkpoint in Checkpoints(run_dir, "export", recipe.checkpointing).all()}
    wanted = checkpoints.folder_of(run_dir, step) if step is not None and step not in complete else None
    if wanted is not None and wanted.exists():
        why = f"{wanted} is not complete: {checkpoints.incomplete(wanted)}. Try {_others(complete)}"
        raise RecipeError(Problem("step", "damaged", why))
    if not complete:
        raise RecipeError(Problem("run", "no-checkpoint", f"{run_dir} has no complete checkpoint"))
    if step is not None and step not in complete:
        why = f"got {step}; expected the step of a complete checkpoint: {', '.join(map(str, complete))}"
        raise RecipeError(Problem("step", "no-checkpoint", why))
    return complete[max(complete) if step is None else step]


def _others(complete: dict[int, Checkpoint]) -> str:
    return f"another step: {', '.join(map(str, complete))}" if complete else "to restore it from a copy; no step is complete"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
