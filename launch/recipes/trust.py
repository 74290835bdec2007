"""Decide which code that a recipe names may be imported before its run.

A submission imports the code, in a process of its own, because the job will run it anyway. A plan and a dry run submit nothing,
and the recipe may be a stranger's, so they only read the code's source (`preflight/user_source.py`). But they import code from
folders that the user trusts: all folders with `trust=true` on the command line, else the folders in the variable
HETSTEP_TRUSTED, separated by colons, and folders inside these. The REST service never imports code for a request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from enum import Enum
from pathlib import Path

VARIABLE = "HETSTEP_TRUSTED"


class Trust(Enum):
    """Whose code may be imported."""

    NOTHING = "nothing"
    LISTED = "the folders in HETSTEP_TRUSTED"
    EVERYTHING = "everything that the recipe names"


_given: ContextVar[Trust | None] = ContextVar("trust", default=None)


def current(dry: bool) -> Trust:
    """Return the trust of this command or request. dry: nothing will be submitted."""
    return _given.get() or (Trust.LISTED if dry else Trust.EVERYTHING)


@contextlib.contextmanager
def trusting(trust: Trust | None) -> Iterator[None]:
    """Set the trust during the block. trust: None changes nothing."""
    token = _given.set(trust or _given.get())
    try:
        yield
    finally:
        _given.reset(token)


def may_import(path: str, folders: Collection[str]) -> list[str] | None:
    """Return the folders that may be searched for the module of a dotted path; None if it may not be imported.

    folders: the recipe's module_folders. The working directory is one of those searched if it is trusted.
    """
    trust, top, searched = current(dry=True), path.partition(".")[0], [*folders, os.getcwd()] if folders else []
    trusted = [str(folder) for folder in trusted_folders(trust, map(Path, searched))]
    found = any(os.path.isfile(f"{folder}/{top}.py") or os.path.isdir(f"{folder}/{top}") for folder in trusted)
    return trusted if found or trust is Trust.EVERYTHING else None


def trusted_folders(trust: Trust, folders: Iterable[Path]) -> list[Path]:
    """Return the folders whose code may be imported."""
    if trust is not Trust.LISTED:
        return list(folders) if trust is Trust.EVERYTHING else []
    trusted = [Path(path).resolve() for path in os.environ.get(VARIABLE, "").split(os.pathsep) if os.path.isabs(path)]
    return [folder for folder in folders if any(folder.resolve().is_relative_to(parent) for parent in trusted)]
