"""Read a run's folder: recipe, submissions, metrics, busy time.

Only files are read, no job is queried. recipe.yaml is read as plain values, without this version's schema, so that runs of
other versions can be shown too. launch/runs/attempts.py reads how attempts ended, launch/runs/run_state.py determines the state
of the job, and launch/runs/run_setup.py writes the folder.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.runs import run_files
from launch.runs.attempts import AttemptFolder, all_attempts
from launch.runs.run_events import DENIED, refusals
from launch.runs.run_files import SubmissionRecord
from launch.terminal.units import plural
from pipeline import config
from pipeline.algorithms import ALGORITHMS
from pipeline.config import ONLINE, Problem, Recipe, RecipeError, bound
from pipeline.files import small_files
from pipeline.observe.metrics import Reader
from pipeline.steering import steer_files
from pipeline.steering.steer_files import ChangeAnswer

STEP_PHASES = ("rollout", "train", "refit")
"""Phases of a step, whose times are within time/step."""
OTHER_PHASES = ("validation", "save")
"""Phases between two steps, whose times are not within time/step."""
DEEPEST = 6
"""Maximum number of levels from the folder of a team's runs down to a run: USER/sweeps/SUITE/ID/runs/NAME."""


@dataclass(frozen=True)
class RunFolder:
    """The content of a run's folder, into which a job may still write."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> RunFolder:
        """Return the RunFolder of a folder. Raises RecipeError if it is no run folder, or cannot be read.

        If this user may not read the folder, the audit log records the denial.
        """
        with refusals(folder):
            return cls._at(folder)

    @classmethod
    def _at(cls, folder: Path) -> RunFolder:
        try:
            if not folder.is_dir():
                raise RecipeError(Problem("run", "file-not-found", f"{folder} is not a run folder: there is no such folder"))
            if not (folder / "recipe.yaml").exists():
                raise RecipeError(Problem("run", "not-a-run", f"{folder} is not a run folder: it has no recipe.yaml"))
            run = cls(folder)
            if not isinstance(run.recipe, dict) or "algorithm" not in run.recipe:
                message = f"{folder} is not a run folder: its recipe.yaml has no `algorithm`"
                raise RecipeError(Problem("run", "not-a-run", message))
        except OSError as error:
            code = DENIED if isinstance(error, PermissionError) else "unreadable"
            raise RecipeError(Problem("run", code, f"{folder} cannot be read: {error.strerror}")) from None
        return run

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Return recipe.yaml as plain values, unchecked."""
        return small_files.read_yaml(self.folder / "recipe.yaml")

    @cached_property
    def submissions(self) -> list[SubmissionRecord]:
        """Return the entries of manifest.json, oldest first: time, user, host, command, Git commit, versions."""
        return run_files.submissions(self.folder)

    @cached_property
    def attempts(self) -> list[AttemptFolder]:
        """Return all starts of the ranks, oldest first."""
        return all_attempts(self.folder)

    @property
    def name(self) -> str:
        """Return the recipe's `name`, or else the folder's."""
        return str(self.recipe.get("name", self.folder.name))

    @property
    def algorithm(self) -> str:
        """Return the recipe's `algorithm`, such as `grpo`."""
        return self.recipe["algorithm"]

    @property
    def trains(self) -> bool:
        """Return whether the run has train ranks; an evaluation has none."""
        return self.algorithm not in ALGORITHMS or ALGORITHMS[self.algorithm].trains_model

    @property
    def samples(self) -> bool:
        """Return whether the run has generate ranks. Of a user's algorithm, which is not imported here, its section tells."""
        if self.algorithm in ALGORITHMS:
            return self.algorithm in ONLINE
        return self.value(f"{self.algorithm}.num_prompts_per_step") is not None

    @property
    def model(self) -> str:
        """Return the policy's model_name; `unknown` if the recipe has none."""
        return str(self.value("policy.model_name", "unknown"))

    @property
    def max_steps(self) -> int | None:
        """Return the maximum number of steps; None if only the epochs of data bound it, or nothing does."""
        key = f"{self.algorithm}.max_num_steps"
        return bound(int(self.changed_values.get(key, self.value(key, 0)))) or None

    @cached_property
    def answers(self) -> list[ChangeAnswer]:
        """Return the answer to each request to change the run while it goes on, oldest first."""
        return steer_files.answers(self.folder)

    @property
    def changed_values(self) -> dict[str, Any]:
        """Return key -> its current value, for keys whose values were changed during the run.

        A later submission with another value in recipe.yaml ends such a change.
        """
        return {
            change.key: change.new
            for answer in self.answers
            for change in answer.changes
            if self.value(change.key) == change.submitted
        }

    def value(self, key: str, otherwise: Any = None) -> Any:
        """Return the recipe's value at a dotted key; `otherwise` if the key is absent or null."""
        value: Any = self.recipe
        for part in key.split("."):
            if not isinstance(value, dict) or value.get(part) is None:
                return otherwise
            value = value[part]
        return value

    # ---- backend, components, layout ------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """Return a text with the train backend if the run trains, and the generate backend if it samples."""
        if not self.trains:
            return str(self.value("policy.generation.backend"))
        train = "Megatron-Core" if self.value("policy.megatron_cfg.enabled") else "FSDP2"
        return f"{train}, {self.value('policy.generation.backend')}" if self.samples else train

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """Return component's name -> its section of the recipe, in rank order."""
        environments = [section for section in self.value("env", {}).values() if isinstance(section, dict)]
        served = any(section.get("served_by") == "reward" for section in environments)
        judged = self.trains and self.samples and self.value("judge.model_name") is not None
        present = {"train": self.trains, "generate": self.samples, "reward": served, "judge": judged}
        present["environment"] = self.samples and self.value("cluster.environment.nodes", 0) > 0
        return {name: self.value(f"cluster.{name}", {}) for name, is_there in present.items() if is_there}

    @property
    def layout(self) -> str:
        """Return a text with the ranks, nodes, GPUs and parallel sizes above 1 of each component."""
        return "; ".join(f"{name}: {', '.join(self._shape(name, component))}" for name, component in self.components.items())

    def _shape(self, name: str, component: dict[str, Any]) -> Iterator[str]:
        nodes, gpus = component.get("nodes", 1), component.get("gpus_per_node", 0)
        yield f"{plural(nodes * (component.get('ranks_per_node') or max(1, gpus)), 'rank')} on {plural(nodes, 'node')}"
        if gpus:
            yield f"{gpus} {component.get('gpu', 'GPUs')} each"
        if name == "environment":
            return
        trainer = "policy.megatron_cfg" if self.value("policy.megatron_cfg.enabled") else "policy.dtensor_cfg"
        section = {"generate": "policy.generation.vllm_cfg", "judge": "judge.vllm_cfg"}.get(name, trainer)
        for key, value in self.value(section, {}).items():
            if key.endswith("_parallel_size") and isinstance(value, int) and value > 1:
                yield f"{key.removesuffix('_parallel_size').replace('_', ' ')} {value}"

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the job; GPUs that train and generate ranks share count once."""
        sharing = {"generate"} if self.value("policy.generation.colocated.enabled") else set()
        return sum(
            component.get("nodes", 1) * component.get("gpus_per_node", 0)
            for name, component in self.components.items()
            if name not in sharing
        )

    # ---- how long -------------------------------------------------------------------------------------------------------

    def busy_s(self) -> float:
        """Return the seconds for which ranks ran: the sum over all attempts of the time from the start to `last_active`."""
        ends = [last_active(attempt) for attempt in self.attempts]
        return sum(max(0.0, end - attempt.started) for attempt, end in zip(self.attempts, ends, strict=True))

    def last_written(self) -> float:
        """Return the unix seconds of the last step, end or submission."""
        return max(modified_time(self.folder / name) for name in ("metrics.jsonl", "done.json", "job.json", "recipe.yaml"))

    # ---- metrics --------------------------------------------------------------------------------------------------------

    def metrics(self, steps: int | None = None) -> MetricColumns:
        """Return the columns of metrics.jsonl, or of its last `steps` lines. Raises RecipeError for a malformed line."""
        columns = MetricColumns()
        for line in Reader(self.folder / "metrics.jsonl", steps).lines():
            columns.append(line)
        return columns


@dataclass
class MetricColumns:
    """The columns of metrics.jsonl, one for each metric. A null is NaN."""

    steps: array = field(default_factory=lambda: array("d"))
    times: array = field(default_factory=lambda: array("d"))  # unix seconds
    columns: dict[str, tuple[array, array]] = field(default_factory=dict)  # key -> (steps, values), in the order of appearance

    def append(self, line: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        step = line["step"]
        self.steps.append(step)
        self.times.append(line["time"])
        for key, value in line.items():
            if key not in ("step", "time"):
                steps, values = self.columns.setdefault(key, (array("d"), array("d")))
                steps.append(step)
                values.append(math.nan if value is None else value)

    def last(self, key: str) -> float | None:
        """Return the latest value of a metric; None if no step has it."""
        return self.columns[key][1][-1] if key in self.columns else None

    def step_after(self, moment: float) -> float | None:
        """Return the first step that ended after `moment` (unix seconds); None if none did."""
        return next((step for step, time in zip(self.steps, self.times, strict=True) if time > moment), None)


def phases(metrics: MetricColumns) -> dict[str, tuple[list[float], list[float]]]:
    """Return phase -> (steps, its seconds in each step).

    The phases are those of a step, the `rest` of time/step, and the phases between steps. A phase that took no time in any step
    is left out.
    """
    columns: dict[str, dict[float, float]] = {part: {} for part in ("step", *STEP_PHASES, *OTHER_PHASES)}
    for part, values in columns.items():
        if f"time/{part}" in metrics.columns:
            values.update(zip(*metrics.columns[f"time/{part}"], strict=True))
    steps = sorted({step for values in columns.values() for step in values})
    step_seconds = columns.pop("step")
    layers = {part: [_or_zero(columns[part].get(step)) for step in steps] for part in STEP_PHASES}
    parts = zip(*layers.values(), strict=True)
    layers["rest"] = [max(0.0, _or_zero(step_seconds.get(step)) - sum(times)) for step, times in zip(steps, parts, strict=True)]
    layers |= {part: [_or_zero(columns[part].get(step)) for step in steps] for part in OTHER_PHASES}
    return {part: (steps, seconds) for part, seconds in layers.items() if any(seconds)}


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def last_active(attempt: AttemptFolder) -> float:
    """Return the unix seconds of an attempt's verdict or, before it has one, of the last write to a rank's log."""
    end = modified_time(attempt.folder / "verdict")
    return end or max([attempt.started, *(modified_time(log) for log in attempt.logs)])


def modified_time(path: Path) -> float:
    """Return the unix seconds of the last write to a file; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


RUN_MARKS = ("recipe.yaml",)
"""Files of which any one marks a folder as a run folder."""


def find(folder: Path, depth: int = 4, marks: Sequence[str] = RUN_MARKS) -> Iterator[Path]:
    """Yield the run folders at most `depth` levels below a folder, or the folder itself if it is one.

    Hidden and unreadable folders are skipped, and so is everything inside a run folder. marks: names of files; folders with one
    of them are yielded instead of run folders.
    """
    if any(os.path.isfile(folder / mark) for mark in marks):  # false, too, where this user may not look
        yield folder
    elif depth and not os.path.isfile(folder / RUN_MARKS[0]):
        try:
            below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
        except (PermissionError, FileNotFoundError, NotADirectoryError):  # also one that has gone meanwhile
            return
        for path in below:
            yield from find(Path(path), depth - 1, marks)


def read_recipe(run_dir: Path) -> Recipe:
    """Return the recipe of the run folder that a command's key `run` names. Raises RecipeError."""
    path = RunFolder.at(run_dir).folder / "recipe.yaml"
    try:
        return config.read(path)
    except RecipeError as error:
        raise RecipeError(Problem("run", "unreadable", f"{path} is not a recipe of this version: {error}")) from error
