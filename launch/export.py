"""Make a Hugging Face checkpoint of what a run has learned: python launch/export.py run=RUN_DIR [step=N] [out=DIR]

    run=RUN_DIR   the run's folder; the run may still be going on
    step=N        which of its checkpoints (default: the latest)
    out=DIR       where to write, a folder that does not exist yet (default: RUN_DIR/hf_step_N)

Writes sharded safetensors in policy.precision, config, tokenizer and chat template, which transformers and vLLM load; of a run
of algorithm rm, as a sequence classifier with one label. It reads the checkpoint's files on this machine, whichever backend and
however many ranks wrote them; no GPU and no job is needed.

Ends with status 0 if it was written, 2 if something about the command line, the run or the checkpoint is wrong, or the disk.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch.units import is_count
from pipeline import config
from pipeline.checkpoint import Checkpoint, Checkpoints
from pipeline.config import Recipe, RecipeError
from pipeline.files import StorageError

KEYS = ("run", "step", "out")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        print(f"written: {export(**parse(arguments))}")
    except (ValueError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {str(error.filename)[:200]}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: list[str]) -> dict[str, str]:
    """Raises ValueError."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in KEYS or not value:
            raise ValueError(f"'{argument}' on the command line is not one of: {', '.join(f'{name}=...' for name in KEYS)}")
        if key in given:
            raise ValueError(f"{key} is on the command line twice")
        given[key] = value
    if "run" not in given:
        raise ValueError("the command line needs run=RUN_DIR")
    return given


def export(run: str, step: str | None = None, out: str | None = None) -> Path:
    """The folder that was written. Raises ValueError if the run or the step is not there, or the folder is."""
    run_dir = Path(run).absolute()
    recipe = _recipe(run_dir)
    checkpoint = _checkpoint(run_dir, recipe, step)
    folder = Path(out).absolute() if out else run_dir / f"hf_step_{checkpoint.step}"
    if folder.exists():
        raise ValueError(f"out: {folder} exists already; remove it or name another folder")
    # Not imported before: they bring torch, and a wrong command line is soon told.
    from pipeline.models.hugging_face import model_config
    from pipeline.train.export import export_checkpoint

    head = "values" if recipe.algorithm == "rm" else "logprobs"
    try:
        model_config(recipe.policy, head)
    except OSError as error:
        raise ValueError(f"policy.model_name, whose paths count from {Path.cwd()}: {error}") from error
    export_checkpoint(checkpoint.folder, recipe.policy, folder, head)
    return folder


def _recipe(run_dir: Path) -> Recipe:
    path = run_dir / "recipe.yaml"
    if not path.exists():
        raise ValueError(f"run: {run_dir} is not a run folder: it has no recipe.yaml")
    try:
        return config.read(path)
    except RecipeError as error:
        raise ValueError(f"run: {path} is not a recipe of this version: {error}") from error


def _checkpoint(run_dir: Path, recipe: Recipe, step: str | None) -> Checkpoint:
    complete = {checkpoint.step: checkpoint for checkpoint in Checkpoints(run_dir, "export", recipe.checkpointing).all()}
    there = f"complete are those of step {', '.join(map(str, complete))}" if complete else "the run has no complete checkpoint"
    if step is None:
        if not complete:
            raise ValueError(f"run: {run_dir}: {there}")
        return complete[max(complete)]
    if not is_count(step):
        raise ValueError(f"step: '{step}' is not a number of steps; {there}")
    if int(step) not in complete:
        raise ValueError(f"step: {run_dir} has no complete checkpoint of step {int(step)}; {there}")
    return complete[int(step)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
