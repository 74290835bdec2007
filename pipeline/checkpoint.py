"""Checkpoints that a kill at any moment cannot spoil.

    checkpoints/
      .step_000020.<attempt>.partial/   being written; never read
      step_000010/                      complete: renamed only after everything in it was on disk
        complete.json                   step, the loop's state, and the size of every file
        train-rank00000.safetensors ... what the train backend wrote
        hf/                             a Hugging Face checkpoint, if checkpointing.save_consolidated;
                                        the run folder's own `hf` leads to the latest when the run has ended

The partial folder bears the attempt's name, so a lost attempt that still writes cannot touch what its rerun writes. Generate
ranks have nothing to save: their weights come by refit, and each request carries its own seed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import CheckpointingConfig

COMPLETE = "complete.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    metric: float | None  # the value of checkpointing.metric_name when it was saved
    state: dict[str, Any]  # the loop's own


class Checkpoints:
    """The checkpoints of one run, as rank 0 manages them."""

    def __init__(self, run_dir: Path, attempt: str, config: CheckpointingConfig):
        self._folder = run_dir / "checkpoints"
        self._attempt = attempt
        self._config = config

    def all(self) -> list[Checkpoint]:
        """The complete ones, oldest first."""
        folders = sorted(self._folder.glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
        return [checkpoint for folder in folders if (checkpoint := _read(folder))]

    def latest(self) -> Checkpoint | None:
        return next(iter(reversed(self.all())), None)

    def clean(self) -> None:
        """Remove what killed attempts left half-written."""
        for folder in self._folder.glob(".step_*"):
            shutil.rmtree(folder)

    def begin(self, step: int) -> Path:
        """An empty folder to write into."""
        partial = self._folder / f".{_name(step)}.{self._attempt}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path, step: int, metric: float | None, state: dict[str, Any]) -> Checkpoint:
        """Everything in `partial` is on disk: make it a checkpoint, then drop those no longer to be kept."""
        files = {str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()}
        write_durably(partial / COMPLETE, json.dumps({"step": step, "metric": metric, "state": state, "files": files}))
        sync(partial)
        folder = self._folder / _name(step)
        if folder.exists():  # an incomplete one; `latest` passed over it
            shutil.rmtree(folder)
        partial.rename(folder)
        sync(self._folder)
        for checkpoint in superfluous(self.all(), self._config):
            shutil.rmtree(checkpoint.folder)
        return Checkpoint(folder, step, metric, state)

    def link_latest(self, link: Path, part: str) -> None:
        """Let `link` point at a part of the latest checkpoint, if that has it."""
        latest = self.latest()
        if latest and (latest.folder / part).exists():
            beside = link.with_name(f".{link.name}.{self._attempt}")
            beside.unlink(missing_ok=True)
            beside.symlink_to(os.path.relpath(latest.folder / part, link.parent))
            beside.replace(link)


def superfluous(checkpoints: list[Checkpoint], config: CheckpointingConfig) -> list[Checkpoint]:
    """Those to delete: all but the best `keep_top_k` by the metric (newest first among equals) and the latest."""
    if config.keep_top_k is None or not checkpoints:
        return []

    def rank(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        value = checkpoint.metric
        sign = 1 if config.higher_is_better else -1
        return value is not None, sign * (value or 0.0), checkpoint.step

    best = sorted(checkpoints, key=rank, reverse=True)[: config.keep_top_k]
    return [checkpoint for checkpoint in checkpoints if checkpoint not in best and checkpoint is not checkpoints[-1]]


def write_durably(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _read(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, or None if it is not complete."""
    if not re.fullmatch(r"step_\d+", folder.name):
        return None
    try:
        record = json.loads((folder / COMPLETE).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if sizes != record["files"]:
        return None
    return Checkpoint(folder, record["step"], record["metric"], record["state"])
