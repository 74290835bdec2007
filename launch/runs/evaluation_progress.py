"""Count the answers that an evaluation has so far."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.recipe import user_files

BLOCK = 1 << 20
PRINT_S = 10.0
"""Seconds between two counts of the answers."""


def evaluates(run_dir: Path) -> bool:
    """Return whether a run is an evaluation that has begun."""
    return (run_dir / "answers").is_dir()


class AnswerCounts:
    """Counts the answers of each task, as their files grow."""

    def __init__(self, run_dir: Path):
        self._folder = run_dir / "answers"
        self._read: dict[Path, tuple[int, int]] = {}  # file -> (bytes read, answers)
        self._looked, self._text = 0.0, ""

    def text(self) -> str:
        """Return a text such as `answers: gsm8k 120`, with counts at most PRINT_S old; "" for a run without answers."""
        now = time.monotonic()
        if now - self._looked >= PRINT_S:
            self._looked = now
            counts = {path.stem: self._count(path) for path in sorted(self._folder.glob("*.jsonl"))}
            self._text = f"answers: {', '.join(f'{name} {count:,}' for name, count in counts.items())}" if counts else ""
        return self._text

    def _count(self, path: Path) -> int:
        start, count = self._read.get(path, (0, 0))
        with user_files.open_file(path) as file:
            file.seek(start)
            while block := file.read(BLOCK):
                start, count = start + len(block), count + block.count(b"\n")
        self._read[path] = start, count
        return self._read[path][1]
