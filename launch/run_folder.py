"""A run as its folder describes it: recipe, submissions, metrics, how long it was busy. Read from files alone.

Neither the run's environment nor this version's schema is needed: recipe.yaml is read as plain values, so that the runs of
other versions can be shown too. How the run ended is in launch/attempts.py, what its job does in launch/run_state.py.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from launch.attempts import AttemptFolder, all_attempts
from launch.units import plural
from pipeline.config import ONLINE, Problem, RecipeError, bound
from pipeline.metrics import Reader

PARTS = ("rollout", "train", "refit")
"""Phases within time/step."""
BESIDE = ("validation", "save")
"""Phases between two steps."""


@dataclass(frozen=True)
class RunFolder:
    """A run folder, which a job may be writing into."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> RunFolder:
        """Raises RecipeError for a folder that is no run folder, or cannot be read."""
        try:
            if not folder.is_dir():
                raise RecipeError(Problem("run", "file-not-found", f"{folder} is not a run folder: there is no such folder"))
            if not (folder / "recipe.yaml").exists():
                raise RecipeError(Problem("run", "not-a-run", f"{folder} is not a run folder: it has no recipe.yaml"))
            run = cls(folder)
            if not isinstance(run.recipe, dict) or "algorithm" not in run.recipe:
                message = f"{folder} is not a run folder: its recipe.yaml says no algorithm"
                raise RecipeError(Problem("run", "not-a-run", message))
        except OSError as error:
            raise RecipeError(Problem("run", "unreadable", f"{folder} cannot be read: {error.strerror}")) from None
        except yaml.YAMLError:
            message = f"{folder} is not a run folder: its recipe.yaml is not YAML"
            raise RecipeError(Problem("run", "bad-format", message)) from None
        return run

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return yaml.load((self.folder / "recipe.yaml").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))

    @cached_property
    def submissions(self) -> list[dict[str, Any]]:
        """manifest.json, oldest first: time, user, host, command, git and so on."""
        path = self.folder / "manifest.json"
        return json.loads(path.read_text()) if path.exists() else []

    @cached_property
    def attempts(self) -> list[AttemptFolder]:
        """Oldest first."""
        return all_attempts(self.folder)

    @property
    def name(self) -> str:
        return str(self.recipe.get("name", self.folder.name))

    @property
    def algorithm(self) -> str:
        return self.recipe["algorithm"]

    @property
    def model(self) -> str:
        return str(self.of("policy.model_name", "unknown"))

    @property
    def max_steps(self) -> int | None:
        """Return the steps that the run makes at most; None: as many as its epochs of data have, or no bound."""
        return bound(int(self.of(f"{self.algorithm}.max_num_steps", 0))) or None

    def of(self, key: str, otherwise: Any = None) -> Any:
        """Return the recipe's value at a dotted key."""
        value: Any = self.recipe
        for part in key.split("."):
            if not isinstance(value, dict) or value.get(part) is None:
                return otherwise
            value = value[part]
        return value

    # ---- who does what ------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        train = "Megatron-Core" if self.of("policy.megatron_cfg.enabled") else "FSDP2"
        return f"{train}, {self.of('policy.generation.backend')}" if self.algorithm in ONLINE else train

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """The job's, in rank order."""
        served = any(isinstance(each, dict) and each.get("served_by") == "reward" for each in self.of("env", {}).values())
        names = ["train", *(["generate"] if self.algorithm in ONLINE else []), *(["reward"] if served else [])]
        return {name: self.of(f"cluster.{name}", {}) for name in names}

    @property
    def layout(self) -> str:
        """Return ranks, nodes and the parallel sizes that are not 1, for people."""
        return "; ".join(f"{name}: {', '.join(self._shape(name, each))}" for name, each in self.components.items())

    def _shape(self, name: str, component: dict[str, Any]) -> Iterator[str]:
        nodes, gpus = component.get("nodes", 1), component.get("gpus_per_node", 0)
        yield f"{plural(nodes * (component.get('ranks_per_node') or max(1, gpus)), 'rank')} on {plural(nodes, 'node')}"
        if gpus:
            yield f"{gpus} {component.get('gpu', 'GPUs')} each"
        section = "generation.vllm_cfg" if name == "generate" else "dtensor_cfg"
        if name != "generate" and self.of("policy.megatron_cfg.enabled"):
            section = "megatron_cfg"
        for key, value in self.of(f"policy.{section}", {}).items():
            if key.endswith("_parallel_size") and isinstance(value, int) and value > 1:
                yield f"{key.removesuffix('_parallel_size').replace('_', ' ')} {value}"

    @property
    def gpus(self) -> int:
        guests = {"generate"} if self.of("policy.generation.colocated.enabled") else set()  # on the GPUs of train
        return sum(
            each.get("nodes", 1) * each.get("gpus_per_node", 0) for name, each in self.components.items() if name not in guests
        )

    # ---- how long -----------------------------------------------------------------------------------------------------------

    def busy_s(self) -> float:
        """Return the seconds in which ranks were running, over all attempts, to the last sign of life of each."""
        ends = [last_sign(attempt) for attempt in self.attempts]
        return sum(max(0.0, end - attempt.started) for attempt, end in zip(self.attempts, ends, strict=True))

    def last_written(self) -> float:
        """Return the unix seconds of its last step, end or submission."""
        return max(_modified(self.folder / name) for name in ("metrics.jsonl", "done.json", "job.json", "recipe.yaml"))

    # ---- metrics ------------------------------------------------------------------------------------------------------------

    def metrics(self, steps: int | None = None) -> Columns:
        """Return metrics.jsonl, or about so many of its last steps. Raises RecipeError for a line that is no step's."""
        columns = Columns()
        for line in Reader(self.folder / "metrics.jsonl", steps).lines():
            columns.take(line)
        return columns


@dataclass
class Columns:
    """metrics.jsonl by column."""

    steps: array = field(default_factory=lambda: array("d"))
    times: array = field(default_factory=lambda: array("d"))  # unix seconds
    columns: dict[str, tuple[array, array]] = field(default_factory=dict)  # key -> (steps, values), in the order of appearance

    def take(self, line: dict[str, Any]) -> None:
        step = line["step"]
        self.steps.append(step)
        self.times.append(line["time"])
        for key, value in line.items():
            if key not in ("step", "time") and (value is None or isinstance(value, int | float)):
                steps, values = self.columns.setdefault(key, (array("d"), array("d")))
                steps.append(step)
                values.append(math.nan if value is None else value)

    def last(self, key: str) -> float | None:
        return self.columns[key][1][-1] if key in self.columns else None

    def step_after(self, moment: float) -> float | None:
        """Return the first step that ended after a moment in unix seconds; None if none did."""
        return next((step for step, time in zip(self.steps, self.times, strict=True) if time > moment), None)


def phases(metrics: Columns) -> dict[str, tuple[list[float], list[float]]]:
    """Phase -> (all steps, seconds in each): the parts of time/step, the rest of it, and what came after it."""
    columns = {
        part: dict(zip(*metrics.columns.get(f"time/{part}", ((), ())), strict=True)) for part in ("step", *PARTS, *BESIDE)
    }
    steps = sorted({step for values in columns.values() for step in values})
    whole = columns.pop("step")
    layers = {part: [_or_zero(columns[part].get(step)) for step in steps] for part in PARTS}
    parts = zip(*layers.values(), strict=True)
    layers["rest"] = [max(0.0, _or_zero(whole.get(step)) - sum(each)) for step, each in zip(steps, parts, strict=True)]
    layers |= {part: [_or_zero(columns[part].get(step)) for step in steps] for part in BESIDE}
    return {part: (steps, seconds) for part, seconds in layers.items() if any(seconds)}


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def last_sign(attempt: AttemptFolder) -> float:
    """Return the unix seconds at which an attempt ended, or was last heard of: its verdict, or the last line in a log."""
    ended = _modified(attempt.folder / "verdict")
    return ended or max([attempt.started, *(_modified(log) for log in attempt.logs)])


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def find(folder: Path, depth: int = 4) -> Iterator[Path]:
    """Yield run folders at or below a folder. Does not look into run folders, hidden folders and what may not be read."""
    if (folder / "recipe.yaml").is_file():
        yield folder
    elif depth:
        try:
            below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
        except (PermissionError, FileNotFoundError, NotADirectoryError):  # also one that has gone meanwhile
            return
        for path in below:
            yield from find(Path(path), depth - 1)
