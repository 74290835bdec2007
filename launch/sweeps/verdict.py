"""Evaluate the gates of a sweep that has ended, and write a new baseline if it was requested.

Each run has a gate `completes`. It fails the suite if the run did not complete, and its message is the first failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from launch.runs import run_files
from launch.runs.attempts import AttemptFolder, all_attempts
from launch.sweeps import baseline as baselines
from launch.sweeps import expressions, run_scores
from launch.sweeps.baseline import Baseline, Provenance, StoredRun
from launch.sweeps.gates import GateCase, GateResult, GateSkipped, Sweep, Verdict, hardware, judge
from launch.sweeps.job_submission import why_failed
from launch.sweeps.measurements import RunMeasurements, measure
from launch.sweeps.queue import Queue
from launch.sweeps.sweep_folder import JobState, SweepFolder, SweepJob
from pipeline.files import small_files

COMPLETES = "completes"
NOT_TEXT = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML forbids, such as escape codes in logs: https://www.w3.org/TR/xml/#charsets."""


@dataclass(frozen=True)
class JobResult:
    """Holds the outcome of one job, for the reports."""

    job: SweepJob
    state: str
    tries: int
    why: list[list[str]]  # why each failed try failed, in lines
    attempts: list[AttemptFolder]
    seconds: float

    @property
    def gate(self) -> str:
        """Name of the gate `completes` for this job."""
        return COMPLETES if self.job.seed is None else f"seed {self.job.seed} {COMPLETES}"

    @property
    def restarts(self) -> int:
        """Number of restarts without a new submission: after a crash, the time limit or preemption."""
        return max(0, len(self.attempts) - self.tries)


@dataclass(frozen=True)
class SweepResult:
    """Holds the verdicts of a sweep, and everything else that its reports show."""

    title: str
    folder: Path
    sweep: Sweep
    ran: list[JobResult]
    verdicts: list[Verdict]  # `completes` of each job, then every gate in the suite's order
    commits: list[str]  # of the code that ran
    judged: str  # time of the evaluation, ISO 8601
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Return whether every gate passed or was skipped."""
        return not self.failed

    @property
    def failed(self) -> list[Verdict]:
        """The verdicts of the gates that failed."""
        return [verdict for verdict in self.verdicts if verdict.outcome is GateResult.FAILED]

    @property
    def summary(self) -> str:
        """The outcome of the sweep in one line."""
        counts = {outcome: sum(verdict.outcome is outcome for verdict in self.verdicts) for outcome in GateResult}
        numbers = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
        return f"{self.title}: {'passed' if self.passed else 'FAILED'}: {numbers}"


def conclude(folder: SweepFolder) -> SweepResult:
    """Evaluate the gates of a sweep, and write a new baseline if it was requested.

    Raises RecipeError for an invalid baseline.
    """
    plan, suite = folder.plan, folder.suite
    job_states = folder.job_states(Queue(plan.executor))
    complete = [state.job for state in job_states if state.state == "done" and state.job.run is not None]
    run_dirs = {run: [Path(job.run_dir) for job in complete if job.run == run] for run in suite.runs}
    run_scores.evaluate_missing(suite, run_dirs, folder.path / run_scores.LOG)
    runs: dict[str, dict[int, RunMeasurements]] = {run: {} for run in suite.runs}
    for state in job_states:
        if state.state == "done" and state.job.run is not None and state.job.seed is not None:
            runs[state.job.run][state.job.seed] = measure(Path(state.job.run_dir))
    ran = [_ran(folder, state) for state in job_states]
    sweep = Sweep(suite, runs, baselines.read(Path(plan.baseline)))
    commits, notes, refused = _commits(plan.jobs), [], []
    if plan.update_baseline:
        renewed, refused = _new_baseline(folder, sweep, ran, commits)
        if not refused:
            baselines.write(renewed, Path(plan.baseline))
            sweep = replace(sweep, baseline=renewed)
            notes.append(f"wrote a new baseline: {plan.baseline}")
    if len(commits) > 1:
        notes.append(f"the runs used different versions of the code: {', '.join(commits)}")
    notes += _change_notes(sweep, plan.jobs)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    verdicts = [*map(_completes, ran), *judge(sweep)]
    verdicts += [Verdict("baseline", "update_baseline", GateResult.FAILED, f"not written: {reason}") for reason in refused]
    return SweepResult(folder.title, folder.path, sweep, ran, verdicts, commits, now, notes)


def _ran(folder: SweepFolder, job_state: JobState) -> JobResult:
    job, run_dir = job_state.job, Path(job_state.job.run_dir)
    failures = [submission.after for submission in folder.submissions(job.name) if submission.after]
    if job_state.state in ("failed", "missing"):
        failures.append(why_failed(job_state))
    failures = [[NOT_TEXT.sub("?", line) for line in lines] for lines in failures]
    seconds = measure(run_dir).seconds if job.run is not None else 0.0
    return JobResult(job, job_state.state, job_state.tries, failures, all_attempts(run_dir), seconds)


def _completes(ran: JobResult) -> Verdict:
    outcome = GateResult.FAILED
    if ran.state == "done":
        outcome = GateResult.PASSED
        message = f"RETRIED: done at try {ran.tries}; before: {main_line(ran.why[0])}" if ran.why else "done"
    elif ran.state == "live":
        message = "has not ended yet"
    else:
        message = (f"failed {len(ran.why)} times, first: " if len(ran.why) > 1 else "") + main_line(ran.why[0])
    restarts = f"; its ranks were restarted {ran.restarts} times" if ran.restarts else ""
    return Verdict(ran.job.run or ran.job.name, ran.gate, outcome, message + restarts)


def main_line(lines: list[str]) -> str:
    """Return the most informative line of a failure: a rank's message, else the last log line, else the first line."""
    messages = [line for line in lines if line.startswith("rank ")]
    log = [line.strip() for line in lines if line.startswith("  ") and line.strip()]
    return (messages or log[-1:] or lines)[0]


def _commits(jobs: list[SweepJob]) -> list[str]:
    """Return the distinct commits of the latest submissions, as `1a2b3c4`, or `1a2b3c4, changed` for changed code."""
    commits = set()
    for job in jobs:
        submissions = run_files.submissions(Path(job.run_dir)) if job.run is not None else []
        if submissions and (git := submissions[-1].get("git")):
            commits.add(git["commit"][:12] + (", changed" if git["dirty"] else ""))
    return sorted(commits)


def _change_notes(sweep: Sweep, jobs: list[SweepJob]) -> list[str]:
    """Return a note for each run whose overrides differ from those in the baseline. They may explain failed gates."""
    if (baseline := sweep.baseline) is None:
        return []
    notes = []
    for run in sweep.suite.runs:
        before, now = set(baseline.of(run).overrides), set(_overrides(jobs, run))
        if run in baseline.runs and before != now:
            changes = [f"{sign}{key}" for sign, keys in (("+", now - before), ("-", before - now)) for key in sorted(keys)]
            notes.append(f"{run} has other overrides than in the baseline: {' '.join(changes)}")
    return notes


def _overrides(jobs: list[SweepJob], run: str) -> list[str]:
    """Return the overrides of a run, without seed, run_dir and cluster keys."""
    job = next(job for job in jobs if job.run == run)
    excluded = ("run_dir=", "cluster.")
    overrides = [
        text for text in job.overrides if not text.startswith(excluded) and not text.partition("=")[0].endswith(".seed")
    ]
    return list({text.partition("=")[0]: text for text in overrides}.values())


def baseline_of(result: SweepResult) -> str:
    """Describe the sweep's baseline and its provenance."""
    if result.sweep.baseline is None:
        return "there is no baseline"
    origin = result.sweep.baseline.provenance
    return f"the baseline is from {origin.date}, {origin.sweep}, commit {origin.commit or 'unknown'}"


# ---- a new baseline -----------------------------------------------------------------------------------------------------


def _new_baseline(folder: SweepFolder, sweep: Sweep, ran: list[JobResult], commits: list[str]) -> tuple[Baseline, list[str]]:
    """Return (the sweep's values as a baseline, the reasons not to write it).

    The reasons are runs that did not complete, gates that do not need a baseline and did not pass, and values that are missing.
    """
    cases = [case for run in sweep.suite.runs for case in sweep.cases(run)]
    independent = [case.verdict() for case in cases if not case.needs_baseline]
    bad = [verdict for verdict in [*map(_completes, ran), *independent] if verdict.outcome is not GateResult.PASSED]
    problems = [f"{verdict.run}, {verdict.gate}: {verdict.message}" for verdict in bad]
    runs: dict[str, StoredRun] = {}
    if not bad:
        for run in sweep.suite.runs:
            stored = runs[run] = StoredRun(_hardware(sweep.runs[run]), _overrides(folder.plan.jobs, run))
            needing = [case for case in sweep.cases(run) if case.needs_baseline]
            for case in needing:
                try:
                    stored.gates[case.name] = case.to_store()
                except (GateSkipped, expressions.NoValue) as error:
                    problems.append(f"{run}, {case.name}: {error}")
            for metric in metrics_of(needing):
                seeds = [measured.curves[metric] for measured in sweep.runs[run].values() if metric in measured.curves]
                stored.curves[metric] = baselines.stored_curve(seeds)
    commit = commits[0] if len(commits) == 1 else ""
    date = datetime.now(UTC).date().isoformat()
    provenance = Provenance(folder.title, date, commit.partition(",")[0] or None, "changed" in commit)
    return Baseline(provenance, runs), problems


def _hardware(seeds: Mapping[int, RunMeasurements]) -> str | None:
    try:
        return hardware(seeds.values())
    except GateSkipped:
        return None


def metrics_of(cases: list[GateCase]) -> list[str]:
    """Return the distinct metrics of the gates' expressions."""
    parsed = (expressions.parse(case.gate.value) for case in cases if case.gate.value is not None)
    return list(dict.fromkeys(metric for expression in parsed for metric in expressions.metrics(expression)))


# ---- verdict.json -------------------------------------------------------------------------------------------------------


class GateOutcome(TypedDict):
    """The outcome of a gate in verdict.json. The file has further keys, which are not read."""

    run: str
    gate: str
    outcome: str


class StoredVerdict(TypedDict):
    """The contents of verdict.json of a sweep or a search."""

    passed: bool
    summary: str
    verdicts: list[GateOutcome]


def read(folder: Path) -> StoredVerdict | None:
    """Return the verdict.json in a sweep's folder; None before the gates are checked. Raises RecipeError if it is damaged."""
    return small_files.read(folder / "verdict.json", StoredVerdict, "check", "Try to delete it: the next check writes it anew")


def write(result: SweepResult) -> None:
    """Write verdict.json, which also marks the sweep as complete."""
    verdicts = [_as_json(verdict) for verdict in result.verdicts]
    value = {"passed": result.passed, "summary": result.summary, "judged": result.judged, "commits": result.commits}
    small_files.write(result.folder / "verdict.json", {**value, "notes": result.notes, "verdicts": verdicts})


def _as_json(verdict: Verdict) -> dict[str, object]:
    values = {**asdict(verdict), "outcome": verdict.outcome.value}
    return {"said" if key == "message" else key: value for key, value in values.items()}
