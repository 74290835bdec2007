"""Start the follower of a run's evaluations as a separate process, and define its request, lock and record.

At most one process follows a run's evaluations by one suite: it holds the lock of RUN_DIR/evaluations/SUITE, and writes
follow.json there. Its output is in RUN_DIR/evaluations/follow.log.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launch.executors.executor import ROOT, start_detached
from launch.runs import run_events
from launch.runs.evaluation_sources import FOLDER
from pipeline.config import ClusterConfig, ComponentConfig, Problem, RecipeError, config_tree
from pipeline.config.config_tree import ConfigMapping, ConfigValue
from pipeline.config.schema import EvaluationConfig
from pipeline.files import small_files

LOG = "follow.log"
RECORD = "follow.json"


@dataclass(frozen=True)
class FollowRequest:
    """The work of a follower."""

    run_dir: Path
    suite: str | None  # None: the run's section `evaluation`
    period: int | None = None
    overrides: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)  # keys over the run's, under the overrides

    @property
    def command(self) -> list[str]:
        """Return the command line that follows the run in the foreground."""
        arguments = {"run": self.run_dir, "step": "follow", "suite": self.suite, "period": self.period}
        keys = [f"{key}={value}" for key, value in arguments.items() if value is not None]
        return [sys.executable, "-u", str(ROOT / "launch/evaluate.py"), *keys, *self.overrides]


def keys_of(section: EvaluationConfig) -> dict[str, Any]:
    """Return nested keys of the evaluation's recipe, from `overrides` and `cluster` of a run's section `evaluation`.

    A key of `cluster` that only components have, such as partition, becomes a key of cluster.generate. Keys may be dotted.
    Raises RecipeError for an empty key.
    """
    for name, keys in (("overrides", section.overrides), ("cluster", section.cluster)):
        if "" in keys:
            raise RecipeError(Problem(f"evaluation.{name}", "bad-format", "got an empty key; expected keys of the recipe"))
    shared = {field.name for field in fields(ClusterConfig)}
    of_component = {field.name for field in fields(ComponentConfig)} - shared
    tree = config_tree.from_plain({}, None)
    for key, value in section.overrides.items():
        tree.set(key, _node(value))
    for key, value in section.cluster.items():
        inside = "cluster.generate" if key.partition(".")[0] in of_component else "cluster"
        layer = ConfigMapping()
        layer.set(f"{inside}.{key}", _node(value))
        tree = config_tree.merge(tree, layer)
    return tree.plain()


def _node(value: Any) -> ConfigMapping | ConfigValue:
    return config_tree.from_plain(value, None)


def is_followed(suite_folder: Path) -> bool:
    """Return whether a process holds the lock of RUN_DIR/evaluations/SUITE."""
    try:
        with open(suite_folder / ".lock") as lock:
            fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock yet, or another user's
        return False
    return False


def write_record(suite_folder: Path, request: FollowRequest, failures: dict[int, str]) -> None:
    """Write follow.json. failures: step -> why the follower gave up the evaluation of that step."""
    record = {"pid": os.getpid(), "host": socket.gethostname(), "period": request.period, "failed": failures}
    small_files.write(suite_folder / RECORD, record)


@dataclass(frozen=True)
class FollowRecord:
    """The keys of follow.json that this version reads."""

    pid: int | None = None
    host: str | None = None
    failed: dict[int, str] = field(default_factory=dict)  # why the evaluation of a step was given up, by step


def read_record(suite_folder: Path) -> FollowRecord | None:
    """Return follow.json; None before a follower has begun. Raises RecipeError for a damaged file."""
    return small_files.read(suite_folder / RECORD, FollowRecord)


def start(request: FollowRequest, name: str) -> str:
    """Start a follower in the background unless one is running, and return a line about it. name: the suite's name.

    Raises RecipeError if the run folder cannot be written.
    """
    folder = request.run_dir / FOLDER
    log = folder / LOG
    if is_followed(folder / name):
        return f"a process already evaluates new checkpoints by {name}; its output is in {log}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(log, "ab") as output:
            process = start_detached(request.command, output, run_events.environment())
    except OSError as error:
        raise RecipeError(Problem("run", "unwritable", f"{log} cannot be written: {error.strerror}")) from None
    again = shlex.join(request.command[2:])
    return f"process {process.pid} evaluates checkpoints by {name}; output: {log}. If it ends early: python {again}"
