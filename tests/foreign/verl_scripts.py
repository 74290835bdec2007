"""verl's published scripts, in a clone of https://github.com/verl-project/verl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

POSITIONS = ("1=8", "2=/tmp/checkpoints")  # of scripts of SFT: GPUs and a folder
NOT_TEXT = ("vl", "omni", "video", "image", "geo3k")


@dataclass(frozen=True)
class Published:
    """A published recipe."""

    name: str
    path: Path
    arguments: tuple[str, ...] = ()


def published(root: Path) -> list[Published]:
    """Return the scripts in examples/ that start a trainer, for text."""
    found = []
    for path in sorted((root / "examples").rglob("*.sh")):
        text = path.read_text()
        words = path.stem.replace("-", "_").split("_")
        if "verl.trainer" not in text or any(word in NOT_TEXT for word in words) or "ascend" in str(path):
            continue
        found.append(Published(str(path.relative_to(root)), path, POSITIONS if "$1" in text else ()))
    return found
