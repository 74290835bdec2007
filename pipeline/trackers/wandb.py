"""Weights & Biases, online or offline.

The run's id is fixed and W&B resumes it, so a record continues over all restarts. Online, W&B's server reports the last step
that it holds. Offline, `transaction_log.py` reads the last step from the files that W&B's own process has written below
tracking/wandb in the run folder. Each start of the tracker adds a file, and
`wandb sync RUN_DIR/tracking/wandb/wandb/offline-run-*` sends all of them.

Credentials come from `wandb login` or WANDB_API_KEY. Left out: the console, Git state, code, and W&B's own samples of the
machine, since metrics.jsonl has those of the resource monitor.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pipeline.recipe.values import Line, Text
from pipeline.trackers.tracker import COLUMNS, LoggedStep, TrackedRun
from pipeline.trackers.transaction_log import TransactionLog

WRITTEN_S = 30.0
"""Seconds in which W&B's process must write a step, or end after the end of the process that started it."""
POLL_S = 0.2


@dataclass
class WandbConfig:
    """The run in Weights & Biases, with the names of `wandb.init`."""

    project: Line = "hetstep"
    """Project."""
    name: Line | None = None
    """Name of the run. null: the recipe's name."""
    entity: Line | None = None
    """User or team. null: the login's default."""
    group: Line | None = None
    """Group of the run. null: none."""
    tags: list[Line] = field(default_factory=list)
    """Tags."""
    notes: Text | None = None
    """A longer description of the run."""
    mode: Literal["online", "offline"] = "online"
    """offline: write files into the run folder, which `wandb sync` sends later."""


class WandbTracker:
    """Records a run as a run of W&B."""

    Section = WandbConfig
    title = "Weights & Biases"
    package = "wandb"
    place = ("entity", "project", "mode")

    def __init__(self, section: WandbConfig, run: TrackedRun, state: dict[str, Any]):
        self._section = section
        self._run = run
        self._state = state
        self._wandb: Any = None
        self._log: TransactionLog | None = None  # of offline runs

    def open(self) -> int | None:
        """Start W&B's run and return the last step that it holds."""
        wandb: Any = import_module("wandb")

        section, folder = self._section, self._run.files("wandb")
        offline = section.mode == "offline"
        if offline:
            self._wait_for_writer()
            self._log = TransactionLog(folder / "wandb", self._run.id)
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=1.0,
        )
        self._wandb = wandb.init(
            project=section.project,
            entity=section.entity,
            id=self._run.id,
            name=section.name or self._run.name,
            group=section.group or (self._run.first if self._run.id != self._run.first else None),
            tags=section.tags or None,
            notes=section.notes,
            config=dict(self._run.recipe),
            dir=str(folder),
            mode=section.mode,
            resume=None if offline else "allow",
            reinit="create_new",
            settings=settings,
        )
        self._state |= {"host": socket.gethostname(), "pid": os.getpid()}
        return self._log.last_step() if self._log else self._wandb.step - 1

    def _wait_for_writer(self) -> None:
        """Wait until W&B's process of an earlier start, which may still write, has ended. Raises TimeoutError."""
        earlier = str(self._state.get("pid"))
        if self._state.get("host") != socket.gethostname() or earlier == str(os.getpid()):
            return
        until = time.monotonic() + WRITTEN_S
        while any("wandb-core" in " ".join(line) and earlier in line for line in _command_lines()):
            if time.monotonic() > until:
                raise TimeoutError(f"the wandb-core of process {earlier} still runs after {WRITTEN_S:g} s")
            time.sleep(POLL_S)

    def log(self, steps: Sequence[LoggedStep]) -> None:
        """Log steps. Offline, wait until they are in the file. Raises TimeoutError if that takes too long."""
        for step in steps:
            self._wandb.log({**step.values, "_timestamp": step.time}, step=step.step, commit=True)
        until = time.monotonic() + WRITTEN_S
        while self._log and self._log.last_step() < steps[-1].step:
            if time.monotonic() > until:
                raise TimeoutError(f"wandb-core has not written step {steps[-1].step} within {WRITTEN_S:g} s")
            time.sleep(POLL_S)

    def log_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record samples as a table of an artifact, because W&B's history takes no values for earlier steps."""
        wandb: Any = import_module("wandb")

        table = wandb.Table(columns=list(COLUMNS), data=[[sample.get(name) for name in COLUMNS] for sample in samples])
        artifact = wandb.Artifact(f"samples-{self._run.id}", type="samples", metadata={"step": step, "kind": kind})
        artifact.add(table, f"{kind}_{step:06d}")
        self._wandb.log_artifact(artifact, aliases=["latest", f"{kind}-{step}"])

    def log_scores(self, suite: str, scored: LoggedStep) -> None:
        """Show the scores in the summary, by step."""
        prefix = f"evaluation/{suite}/step_{scored.step}"
        self._wandb.summary.update({f"{prefix}/{name}": value for name, value in scored.values.items()})

    def log_file(self, path: Path) -> None:
        """Record a file as its own artifact."""
        wandb: Any = import_module("wandb")

        artifact = wandb.Artifact(f"{path.stem}-{self._run.id}", type=path.stem)
        artifact.add_file(str(path), name=path.name)
        self._wandb.log_artifact(artifact)

    def log_model(self, folder: Path) -> None:
        """Show the model's folder in the summary."""
        self._wandb.summary.update({"model": str(folder)})

    def close(self, ended: bool) -> None:
        """Finish W&B's run, which delivers what is left."""
        if self._wandb is not None:
            self._wandb.finish()


def _command_lines() -> list[list[str]]:
    psutil: Any = import_module("psutil")  # here, because reading a recipe imports this module
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
