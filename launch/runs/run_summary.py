"""Summarize a run as plain values, which `status` prints or writes as JSON.

`line` is cheap, for lists of hundreds of runs: it reads only the end of metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.runs import evaluated_checkpoints, resources, run_changes, score_tables, startup_stages, suites
from launch.runs.attempts import AttemptFolder
from launch.runs.evaluation_progress import AnswerCounts
from launch.runs.failure_logs import container_failure, failed_log_lines, killed_lines
from launch.runs.follow import FAULT_METRICS, first_failure
from launch.runs.run_folder import MetricColumns, RunFolder, last_active, modified_time, phases
from launch.runs.run_state import RunState
from pipeline.checkpoints.checkpoint import NAME, Checkpoints
from pipeline.config import CheckpointingConfig
from pipeline.recipe.values import seconds

RECENT = 20
"""Number of latest steps for pace, trends and phase times."""
LINES, LINES_OF_ONE = 2 * RECENT, 400
"""Numbers of latest steps that `line` and `full` read. `full` reads more, because validations are many steps apart."""
SUMMARY_METRICS = (
    *("train/reward", "train/accuracy", "train/loss", "train/teacher_kl"),
    *("val/reward", "val/accuracy", "val/loss", "train/grad_norm"),
)
LOG_LINES = 20
"""Number of log lines that are shown of a failed run without failure.json."""


def line(run: RunFolder, state: RunState) -> dict[str, Any]:
    """Return the values of a run's line in a list. Times are unix seconds, durations are seconds; None: not known yet."""
    return _line(run, state, run.metrics(LINES))


def _line(run: RunFolder, state: RunState, metrics: MetricColumns) -> dict[str, Any]:
    pace = _pace(run, metrics)
    step = int(metrics.steps[-1]) if metrics.steps else int(run.value("evaluate.step", 0)) * (not run.trains)
    seconds_left = (run.max_steps - step) * pace if pace and run.max_steps is not None and state.name == "running" else None
    return {
        "folder": str(run.folder),
        "name": run.name,
        "algorithm": run.algorithm,
        "state": state.name,
        "why": state.why,
        "job": state.job,
        "step": step,
        "max_steps": run.max_steps,
        "seconds_per_step": pace,
        "seconds_left": seconds_left,
        "restarts": max(0, len(run.attempts) - 1),
        "last_written": run.last_written(),
        "metrics": _own_scores(run)
        if not run.trains
        else {
            key: values
            for key in (*SUMMARY_METRICS, *FAULT_METRICS)
            if (values := _recent(metrics, key)) and (key not in FAULT_METRICS or any(values))
        },
    }


def full(run: RunFolder, state: RunState) -> dict[str, Any]:
    """Return all values about one run, those of `line` included."""
    metrics = run.metrics(LINES_OF_ONE)
    return {
        **_line(run, state, metrics),
        "trains": run.trains,
        "answers": AnswerCounts(run.folder).text(),
        "model": run.model,
        "backend": run.backend,
        "layout": run.layout,
        "components": [
            {"name": name, "state": part.state, "nodes": part.nodes, "reason": part.reason}
            for name, part in state.components.items()
        ],
        "startup": startup_stages.as_plain(startup_stages.stages(run.folder)),
        "startup_text": startup_stages.text(startup_stages.stages(run.folder), _end_time(run, state)),
        "starting": state.name == "running" and _current_steps(run, metrics) == {},
        "ends_by": state.ends_by,
        "saves_by": _saves_by(run, state),
        "phases": _phase_means(metrics),
        "idle": _idle_means(metrics),
        "resources": resources.texts(metrics, run.components),
        "warnings": resources.warnings(run, (metrics.steps[-1] if metrics.steps else 0) - resources.CURRENT_STEPS),
        "tokens_per_s": metrics.last("throughput/tokens_per_s"),
        "checkpoint": _checkpoint(run),
        "changes": run_changes.rows(run),
        "asked_changes": run_changes.pending(run),
        "evaluations": _evaluations(run),
        "attempts": [_attempt(attempt) for attempt in run.attempts],
        "failure": _why(run, state),
        "logs": str(run.attempts[-1].folder if run.attempts else run.folder / "submitit"),
    }


def _own_scores(run: RunFolder) -> dict[str, list[float]]:
    """Return task -> [its score] for a run that is an evaluation; {} before it has ended."""
    scores = score_tables.read(run.folder)
    main = score_tables.main_scores(scores) if scores else {}
    return {name: [of["value"]] for name, of in main.items() if of["value"] is not None}


def _end_time(run: RunFolder, state: RunState) -> float | None:
    """Return the unix seconds at which the run's latest attempt was last active; None if the run has not ended."""
    if state.name in ("running", "waiting", "unknown") or not run.attempts:
        return None
    return last_active(run.attempts[-1])


# ---- metrics ------------------------------------------------------------------------------------------------------------


def _pace(run: RunFolder, metrics: MetricColumns) -> float | None:
    """Return the mean seconds between the ends of steps in the current attempt; None before its second step."""
    recent = sorted(_current_steps(run, metrics).items())[-RECENT:]
    if len(recent) < 2:
        return None
    (first, begin), (last, end) = recent[0], recent[-1]
    return (end - begin) / (last - first)


def _current_steps(run: RunFolder, metrics: MetricColumns) -> dict[float, float]:
    """Return step -> unix seconds of its end, for the steps of the current attempt."""
    start = run.attempts[-1].started if run.attempts else 0.0
    return {step: moment for step, moment in zip(metrics.steps, metrics.times, strict=True) if moment > start}


def _recent(metrics: MetricColumns, key: str) -> list[float]:
    """Return the latest values of a metric, oldest first."""
    return list(metrics.columns[key][1][-RECENT:]) if key in metrics.columns else []


def _phase_means(metrics: MetricColumns) -> dict[str, float]:
    """Return phase -> its mean seconds over the latest steps."""
    recent = {phase: seconds[-RECENT:] for phase, (_, seconds) in phases(metrics).items()}
    return {phase: sum(seconds) / len(seconds) for phase, seconds in recent.items()}


def _idle_means(metrics: MetricColumns) -> dict[str, float]:
    """Return component -> its mean idle fraction over the latest steps."""
    recent = {key.partition("/")[2]: _recent(metrics, key) for key in metrics.columns if key.startswith("idle/")}
    return {realm: sum(shares) / len(shares) for realm, shares in recent.items()}


def _saves_by(run: RunFolder, state: RunState) -> float | None:
    by = run.value("checkpointing.checkpoint_must_save_by")
    if by is None or state.name != "running" or not run.attempts:
        return None
    return run.attempts[-1].started + seconds(by)


# ---- checkpoints and failures -------------------------------------------------------------------------------------------


def _checkpoint(run: RunFolder) -> dict[str, Any]:
    """Return the latest complete checkpoint, and the names of partial and incomplete ones."""
    folder = run.folder / "checkpoints"
    checkpoints = Checkpoints(run.folder, "", CheckpointingConfig()).all()
    partial = sorted(path.name.split(".")[1] for path in folder.glob(".step_*.partial"))
    incomplete = {path.name for path in folder.glob("step_*") if NAME.fullmatch(path.name)} - {
        point.folder.name for point in checkpoints
    }
    summary: dict[str, Any] = {"count": len(checkpoints), "partial": partial, "incomplete": sorted(incomplete)}
    if checkpoints:
        latest = checkpoints[-1]
        summary |= {"step": latest.step, "written": modified_time(latest.folder / "complete.json")}
        summary |= {"bytes": _bytes_in(latest.folder), "folder": str(latest.folder)}
    return summary


def _bytes_in(folder: Path) -> int:
    """Return the size of the files below a folder, which the run may remove meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _evaluations(run: RunFolder) -> list[dict[str, Any]]:
    """Return a mapping about the evaluations by each suite; [] for a run without evaluations."""
    evaluations = [asdict(suite) for suite in evaluated_checkpoints.of_run(run.folder)]
    for suite in evaluations:
        suite["scores"] = {step: score_tables.main_scores(scores) for step, scores in suite["scores"].items()}
        suite["asked"] = suite["suite"] == suites.name_of(run.value("evaluation.suite", ""))
    return evaluations


def _attempt(attempt: AttemptFolder) -> dict[str, Any]:
    return {
        "name": attempt.name,
        "started": attempt.started,
        "lasted": max(0.0, last_active(attempt) - attempt.started),
        "verdict": attempt.verdict,
        "bad_nodes": attempt.bad_nodes,
        "failure": attempt.failure,
    }


def _why(run: RunFolder, state: RunState) -> list[str]:
    """Return lines that say why the latest attempt failed, from its failure.json or else the end of the most useful log."""
    attempt = run.attempts[-1] if run.attempts else None
    if attempt and attempt.failure:
        return first_failure(attempt)
    if state.name != "failed" or (attempt and attempt.requeue_reason):
        return []
    killed = killed_lines(attempt) if attempt else []
    start_failure = container_failure(run.folder, attempt) if attempt else []
    return start_failure or [*killed, *failed_log_lines(run.folder, attempt, LOG_LINES)]
