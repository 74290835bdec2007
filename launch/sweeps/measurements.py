"""Read what gates compare from run folders: metrics as curves, hardware, and the scores of evaluations.

The check first makes the evaluations that gates need and that do not exist yet. A gate names a suite, a task and a checkpoint's
step, by default the last. A run that is itself an evaluation has its own scores.
"""

from __future__ import annotations

import fnmatch
import hashlib
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.executors.executor import ROOT
from launch.runs import evaluation_folder, run_files, run_setup, suites
from launch.runs.attempts import all_attempts
from launch.runs.evaluation_folder import EvaluationFolder
from launch.runs.run_folder import RunFolder
from launch.runs.score_tables import SCORES
from launch.sweeps.expressions import Curve, NoValue
from launch.sweeps.suite import EvaluationGateConfig, Suite, gates_of
from launch.terminal.safe_text import on_one_line
from pipeline.observe.metrics import NOT_REPRODUCIBLE
from pipeline.observe.metrics import read as read_metrics

DIGITS = 12  # of a question's hash
Questions = Mapping[str, Sequence[float]]
"""Hash of a question -> the values of its samples."""


@dataclass(frozen=True)
class RunMeasurements:
    """Holds the metrics and the hardware of one run with one seed."""

    curves: Mapping[str, Curve]
    hardware: str | None  # such as "2 x (8 x NVIDIA H100 80GB HBM3)"; None if not recorded
    seconds: float = 0.0  # from the start of its first attempt to its last step
    folder: Path | None = None  # the run's

    def reproducible(self, patterns: list[str]) -> dict[str, Curve]:
        """Return the metrics that match any of `patterns` and that an equal run reproduces to the last bit.

        On GPUs a second run reproduces them only with policy.deterministic=true.
        """
        curves = {name: curve for name, curve in self.curves.items() if not name.startswith(NOT_REPRODUCIBLE)}
        return {name: curve for name, curve in curves.items() if any(fnmatch.fnmatchcase(name, glob) for glob in patterns)}


def measure(run_dir: Path) -> RunMeasurements:
    """Return the metrics and the hardware of a run. Raises RecipeError for a malformed metrics.jsonl."""
    lines, attempts = read_metrics(run_dir / "metrics.jsonl"), all_attempts(run_dir)
    seconds = max(0.0, lines[-1]["time"] - attempts[0].started) if lines and attempts else 0.0
    nodes = next((nodes for attempt in reversed(attempts) if (nodes := run_files.nodes(attempt.folder))), {})
    return RunMeasurements(curves(lines), by_kind(nodes.values()), seconds, run_dir)


def curves(lines: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return metric -> its curve, over the steps that have the metric. lines: the records of metrics.jsonl."""
    points: dict[str, dict[int, float | None]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "time"):
                points.setdefault(name, {})[line["step"]] = value
    return {name: Curve([*values], [*values.values()]) for name, values in points.items()}


def by_kind(nodes: Iterable[Any]) -> str | None:
    """Return a text that counts the nodes of a nodes.json by kind; None if a node lists neither GPUs nor its processor."""
    kinds: Counter[str] = Counter()
    for node in nodes:
        gpus = Counter(gpu["name"] for gpu in node.get("gpus", ()))
        kind = ", ".join(f"{count} x {name}" for name, count in sorted(gpus.items())) or node.get("cpu")
        if kind is None:
            return None
        kinds[kind] += 1
    return "; ".join(f"{count} x ({kind})" if count > 1 else kind for kind, count in sorted(kinds.items())) or None


# ---- over the seeds -----------------------------------------------------------------------------------------------------


def by_step(seeds: Iterable[Curve]) -> dict[int, list[float]]:
    """Return step -> the values of the seeds, steps ascending. A seed without a value at a step is left out there."""
    values_by_step: dict[int, list[float]] = {}
    for curve in seeds:
        for step, value in zip(curve.steps, curve.values, strict=True):
            if value is not None:
                values_by_step.setdefault(step, []).append(value)
    return dict(sorted(values_by_step.items()))


def spread(values: Iterable[float]) -> float:
    """Return the sample standard deviation; 0 for a single value."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else 0.0


# ---- scores -------------------------------------------------------------------------------------------------------------


def evaluation_of(run_dir: Path, gate: EvaluationGateConfig) -> EvaluationFolder:
    """Return the evaluation of a run that a gate reads. Raises NoValue if the evaluation or its task is missing."""
    name, step, evaluations = _evaluations(run_dir, gate)
    if not evaluations:
        raise NoValue(f"{run_dir} has no evaluation with the suite {name}" + ("" if step is None else f" at step {step}"))
    return _with_task(evaluations[-1], gate)


def evaluation_in(folder: str, gate: EvaluationGateConfig) -> EvaluationFolder:
    """Return the evaluation in a folder that a gate names as its reference. Raises NoValue."""
    evaluation = evaluation_folder.read(Path(folder))
    if evaluation is None:
        raise NoValue(f"{folder} has no {SCORES}")
    return _with_task(evaluation, gate)


def _evaluations(run_dir: Path, gate: EvaluationGateConfig) -> tuple[str, int | None, list[EvaluationFolder]]:
    """Return (the suite's name, the checkpoint's step, the run's evaluations with both). An evaluation itself has no step."""
    name, step = suites.find(gate.suite)[0], gate.step
    if RunFolder.at(run_dir).algorithm == "evaluate":
        step = None
    elif step is None:
        step = run_setup.done_step(run_dir)
    of_run = evaluation_folder.of_run(run_dir)
    return name, step, [evaluation for evaluation in of_run if (evaluation.suite, evaluation.step) == (name, step)]


def _with_task(evaluation: EvaluationFolder, gate: EvaluationGateConfig) -> EvaluationFolder:
    if gate.task not in evaluation.tasks:
        raise NoValue(f"{evaluation.folder} has no task {gate.task}; it has {', '.join(evaluation.tasks) or 'none'}")
    return evaluation


def score(evaluation: EvaluationFolder, gate: EvaluationGateConfig) -> float:
    """Return the score that a gate reads from an evaluation. Raises NoValue."""
    task = evaluation.tasks[gate.task]
    metric = gate.metric or task["metric"]
    value = task["metrics"].get(metric, {}).get("value")
    if value is None:
        raise NoValue(f"{evaluation.folder}: {gate.task} has no {metric}; it has {', '.join(task['metrics']) or 'none'}")
    return value


def questions(evaluations: Iterable[EvaluationFolder], gate: EvaluationGateConfig) -> dict[str, list[float]]:
    """Return hash of a question's id -> the values of its samples in all these evaluations, such as those of all seeds."""
    samples: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for question, values in evaluation.values(gate.task, gate.metric).items():
            digest = hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
            samples.setdefault(f"q{digest}", []).extend(values)
    return dict(sorted(samples.items()))


def evaluate_missing(suite: Suite, run_dirs: Mapping[str, Sequence[Path]], log: Path) -> None:
    """Evaluate the checkpoints whose scores gates need and do not have yet, one after another.

    run_dirs: run -> folders of its completed jobs. A failed evaluation raises nothing; its gate fails later. The output of
    launch/evaluate.py goes into `log`.
    """
    for run, folders in run_dirs.items():
        for command in (command for run_dir in folders for command in dict.fromkeys(missing(suite, run, run_dir))):
            print(on_one_line(f"evaluates {' '.join(command)}"), flush=True)
            with open(log, "ab") as output:
                program = [sys.executable, "-u", str(ROOT / "launch/evaluate.py"), *command]
                status = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
            if status:
                print(f"the evaluation ended with status {status}: {log}", flush=True)


def missing(suite: Suite, run: str, run_dir: Path) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of launch/evaluate.py for each evaluation of a run that gates need and that does not exist."""
    for name in suite.runs:
        for gate in gates_of(suite, name).values():
            if (evaluation := gate.evaluation) and run in (name, evaluation.not_worse_than):
                _, step, existing = _evaluations(run_dir, evaluation)
                if step is not None and not existing:
                    yield f"suite={evaluation.suite}", f"run={run_dir}", f"step={step}"
