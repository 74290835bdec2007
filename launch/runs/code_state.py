"""Identify this code by its Git commit and a hash of the uncommitted changes."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from launch.executors.executor import ROOT

GIT_S = 20.0
"""Time limit of git on a slow file system: a manifest without a commit is better than no submission."""
LARGEST = 1 << 20
"""Largest untracked file, in bytes, whose content is hashed. Larger files are hardly code; their names and sizes are hashed."""


def code_state() -> dict[str, Any] | None:
    """Return {"commit", "dirty", "diff"} of this checkout; None outside a Git checkout, or if Git takes too long.

    diff: SHA-256, in hex, of the changes of tracked files (`git diff HEAD --binary`) and of the untracked files that Git does
    not ignore; None without changes.
    """
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    if commit is None or status is None:
        return None
    return {"commit": commit.decode().strip(), "dirty": bool(status.strip()), "diff": _diff() if status.strip() else None}


def _diff() -> str | None:
    changes, untracked = (
        _git("diff", "HEAD", "--binary", "--no-ext-diff"),
        _git("ls-files", "-z", "--others", "--exclude-standard"),
    )
    if changes is None or untracked is None:
        return None
    digest = hashlib.sha256(changes)
    for name in sorted(untracked.split(b"\0")):
        path = ROOT / name.decode(errors="surrogateescape")
        if name and path.is_file():
            digest.update(b"\0" + name + b"\0" + _content(path))
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    size = path.stat().st_size
    return hashlib.sha256(path.read_bytes()).digest() if size <= LARGEST else str(size).encode()


def _git(*args: str) -> bytes | None:
    try:
        answer = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, timeout=GIT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
