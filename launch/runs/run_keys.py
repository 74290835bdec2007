"""Obtain the encryption key of a run's checkpoints and rollouts, for commands that read its folder.

HETSTEP_KEY_FILE, the path of a file with the key, takes precedence over checkpointing.encryption of the run's recipe.yaml,
because the key file of the ranks may not be on this machine.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

from launch.runs.run_folder import RunFolder
from pipeline.files.storage import user_name
from pipeline.files.stored_files import SECTION, FileKey, obtain_key
from pipeline.recipe.problems import Problem, RecipeError

VARIABLE = "HETSTEP_KEY_FILE"


def key_of(run_dir: Path) -> FileKey | None:
    """Return the encryption key of a run; None if neither HETSTEP_KEY_FILE nor the run's recipe names one.

    Raises RecipeError if the key cannot be obtained, or if another user's recipe names a command to obtain it, because that
    command could do anything.
    """
    if path := os.environ.get(VARIABLE):
        try:
            return obtain_key(path, None)
        except RecipeError as error:
            raise RecipeError(*(dataclasses.replace(problem, key=VARIABLE) for problem in error.problems)) from None
    run = RunFolder.at(run_dir)
    key_file, key_command = (run.value(f"{SECTION}.{name}") for name in ("key_file", "key_command"))
    if key_command is not None and (owner := (run_dir / "recipe.yaml").stat().st_uid) != os.geteuid():
        message = f"got a command from a run of {user_name(owner)}; expected your own run, because the command runs as you"
        raise RecipeError(Problem(f"{SECTION}.key_command", "permission-denied", f"{message}. Try {VARIABLE}=FILE"))
    return obtain_key(key_file, key_command)


def source(run_dir: Path) -> Callable[[], FileKey | None]:
    """Return a function that returns the key of a run, which its first call obtains, because most runs need none."""
    return functools.cache(lambda: key_of(run_dir))
