"""Read the scores of a sweep's runs for its gates. The check first makes the evaluations that do not exist yet.

A gate names a suite, a task and a checkpoint's step, by default the last. A run that is itself an evaluation has its own
scores.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launch.executors.executor import ROOT
from launch.runs import evaluation_folder, run_setup, suites
from launch.runs.evaluation_folder import EvaluationFolder
from launch.runs.run_folder import RunFolder
from launch.runs.score_tables import SCORES
from launch.sweeps.expressions import NoValue
from launch.sweeps.suite import EvaluationGateConfig, Suite, gates_of
from launch.terminal.safe_text import on_one_line

LOG = "evaluate.log"
DIGITS = 12  # of a question's hash
Questions = Mapping[str, Sequence[float]]
"""Question -> the values of its samples."""


def find(run_dir: Path, gate: EvaluationGateConfig) -> EvaluationFolder:
    """Return the evaluation of a run that a gate reads. Raises NoValue if the evaluation or its task is missing."""
    step, name = _step(run_dir, gate), suites.find(gate.suite)[0]
    evaluations = [folder for folder in evaluation_folder.of_run(run_dir) if folder.suite == name and folder.step == step]
    if not evaluations:
        raise NoValue(f"{run_dir} has no evaluation with the suite {name}" + ("" if step is None else f" at step {step}"))
    return _with_task(evaluations[-1], gate)


def _with_task(evaluation: EvaluationFolder, gate: EvaluationGateConfig) -> EvaluationFolder:
    if gate.task not in evaluation.tasks:
        raise NoValue(f"{evaluation.folder} has no task {gate.task}; it has {', '.join(evaluation.tasks) or 'none'}")
    return evaluation


def _step(run_dir: Path, gate: EvaluationGateConfig) -> int | None:
    """Return the step of the checkpoint that a gate reads; None if the run is itself an evaluation."""
    if RunFolder.at(run_dir).algorithm == "evaluate":
        return None
    return run_setup.done_step(run_dir) if gate.step is None else gate.step


def score(evaluation: EvaluationFolder, gate: EvaluationGateConfig) -> float:
    """Return the score that a gate reads from an evaluation. Raises NoValue."""
    task = evaluation.tasks[gate.task]
    metric = gate.metric or task["metric"]
    value = task["metrics"].get(metric, {}).get("value")
    if value is None:
        raise NoValue(f"{evaluation.folder}: {gate.task} has no {metric}; it has {', '.join(task['metrics']) or 'none'}")
    return value


def in_folder(folder: str, gate: EvaluationGateConfig) -> EvaluationFolder:
    """Return the evaluation in a folder that a gate names as its reference. Raises NoValue."""
    evaluation = evaluation_folder.read(Path(folder))
    if evaluation is None:
        raise NoValue(f"{folder} has no {SCORES}")
    return _with_task(evaluation, gate)


def questions(evaluations: Sequence[EvaluationFolder], gate: EvaluationGateConfig) -> dict[str, list[float]]:
    """Return hash of a question's id -> the values of the question's samples.

    The samples are those of all these evaluations together, such as the evaluations of all seeds.
    """
    values_by_question: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for question, values in evaluation.values(gate.task, gate.metric).items():
            values_by_question.setdefault(_hash(question), []).extend(values)
    return dict(sorted(values_by_question.items()))


def _hash(question: str) -> str:
    return "q" + hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()[:DIGITS]


# ---- evaluations that are missing -------------------------------------------------------------------------------------------


def evaluate_missing(suite: Suite, run_dirs: Mapping[str, Sequence[Path]], log: Path) -> None:
    """Evaluate the checkpoints whose scores gates need and do not have yet, one after another.

    run_dirs: run -> folders of its completed jobs. A failed evaluation raises nothing; its gate fails later. The output of
    launch/evaluate.py goes into `log`.
    """
    for run, folders in run_dirs.items():
        for run_dir in folders:
            for command in dict.fromkeys(_missing(suite, run, run_dir)):
                print(on_one_line(f"evaluates {' '.join(command)}"), flush=True)
                with open(log, "ab") as output:
                    program = [sys.executable, "-u", str(ROOT / "launch/evaluate.py"), *command]
                    status = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
                if status:
                    print(f"the evaluation ended with status {status}: {log}", flush=True)


def _missing(suite: Suite, run: str, run_dir: Path) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of launch/evaluate.py for each evaluation of a run that gates need and that does not exist."""
    for gate in _gates_on(suite, run):
        step, name = _step(run_dir, gate), suites.find(gate.suite)[0]
        if step is None or any(folder.suite == name and folder.step == step for folder in evaluation_folder.of_run(run_dir)):
            continue
        yield f"suite={gate.suite}", f"run={run_dir}", f"step={step}"


def _gates_on(suite: Suite, run: str) -> Iterator[EvaluationGateConfig]:
    """Yield the evaluation sections of the gates of a run, and of the gates of other runs that compare with it."""
    for name in suite.runs:
        for gate in gates_of(suite, name).values():
            if gate.evaluation and run in (name, gate.evaluation.not_worse_than):
                yield gate.evaluation
