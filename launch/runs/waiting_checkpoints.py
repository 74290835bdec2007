"""Keep the checkpoints that wait for their evaluation, by hard links in the evaluation's folder.

A run removes all but its best checkpoints (checkpointing.keep_top_k), and may remove one before its evaluation has begun or has
read the weights. Links cost no space while the run has the checkpoint too. They are removed when the checkpoint is evaluated.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.checkpoints import checkpoint
from pipeline.config import Problem, RecipeError

NAME = "checkpoint"


def checkpoint_folder(folder: Path) -> Path:
    """Return the folder in which an evaluation keeps its checkpoint."""
    return folder / NAME


def folders(suite_folder: Path) -> list[Path]:
    """Return the folders of the kept checkpoints of a run's evaluations by one suite."""
    return sorted(suite_folder.glob(f"step_*/{NAME}"))


def keep(source: Path, folder: Path) -> Path:
    """Link all files of a complete checkpoint into an evaluation's folder, and return the new folder.

    Raises RecipeError if the run removes the checkpoint meanwhile, or if the file system has no hard links.
    """
    target = checkpoint_folder(folder)
    if target == source or checkpoint.read(target):
        return target
    partial = folder / f".{NAME}.{os.getpid()}.partial"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(source.rglob("*")):
            if path.is_file():
                link = partial / path.relative_to(source)
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, link)
        if checkpoint.read(partial):
            shutil.rmtree(target, ignore_errors=True)  # incomplete: an earlier try was killed
            partial.rename(target)
            return target
    except FileNotFoundError:
        pass  # the run has removed it
    except OSError as error:
        if checkpoint.read(target):  # another process has just kept it
            return target
        message = f"{source} cannot be linked into {folder}: {error.strerror}. Try model=PATH with an export of it"
        raise RecipeError(Problem("run", "unwritable", message)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    message = f"the run has just removed {source} (checkpointing.keep_top_k). Try another step, or step=follow"
    raise RecipeError(Problem("step", "no-checkpoint", message))


def release(folder: Path) -> None:
    """Remove the links in an evaluation's folder, also those of an interrupted `keep`."""
    for path in (checkpoint_folder(folder), *folder.glob(f".{NAME}.*.partial")):
        shutil.rmtree(path, ignore_errors=True)
