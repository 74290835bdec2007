"""Evaluate the gates of a sweep that has ended, write a new baseline if it was requested, and write verdict.json.

Each run has a gate `completes`. It fails the suite if the run did not complete, and its message is the first failure.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from launch.runs import run_files
from launch.runs.attempts import all_attempts
from launch.sweeps import baseline as baselines
from launch.sweeps.baseline import Baseline, Provenance, StoredRun
from launch.sweeps.expressions import NoValue
from launch.sweeps.gates import GateResult, GateSkipped, Sweep, Verdict, hardware, judge
from launch.sweeps.measurements import RunMeasurements, evaluate_missing, measure
from launch.sweeps.submission import main_line, why_failed
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
    restarts: int  # without a new submission: after a crash, the time limit or preemption
    seconds: float

    @property
    def gate(self) -> str:
        """Name of the gate `completes` for this job."""
        return COMPLETES if self.job.seed is None else f"seed {self.job.seed} {COMPLETES}"

    def completes(self) -> Verdict:
        """Return the verdict of the gate `completes`."""
        outcome = GateResult.FAILED
        if self.state == "done":
            outcome = GateResult.PASSED
            message = f"RETRIED: done at try {self.tries}; before: {main_line(self.why[0])}" if self.why else "done"
        elif self.state == "live":
            message = "has not ended yet"
        else:
            message = (f"failed {len(self.why)} times, first: " if len(self.why) > 1 else "") + main_line(self.why[0])
        restarts = f"; its ranks were restarted {self.restarts} times" if self.restarts else ""
        return Verdict(self.job.run or self.job.name, self.gate, outcome, message + restarts)


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

    @property
    def baseline(self) -> str:
        """The provenance of the sweep's baseline."""
        if self.sweep.baseline is None:
            return "there is no baseline"
        origin = self.sweep.baseline.provenance
        return f"the baseline is from {origin.date}, {origin.sweep}, commit {origin.commit or 'unknown'}"


def conclude(folder: SweepFolder) -> SweepResult:
    """Evaluate the gates of a sweep, and write a new baseline if it was requested.

    Raises RecipeError for an invalid baseline.
    """
    plan, suite, job_states = folder.plan, folder.suite, folder.job_states()
    complete = [state.job for state in job_states if state.state == "done" and state.job.run is not None]
    run_dirs = {run: [Path(job.run_dir) for job in complete if job.run == run] for run in suite.runs}
    evaluate_missing(suite, run_dirs, folder.path / "evaluate.log")
    runs: dict[str, dict[int, RunMeasurements]] = {run: {} for run in suite.runs}
    for job in complete:
        assert job.run is not None and job.seed is not None, "a run's job has both"
        runs[job.run][job.seed] = measure(Path(job.run_dir))
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
    verdicts = [*(job.completes() for job in ran), *judge(sweep)]
    verdicts += [Verdict("baseline", "update_baseline", GateResult.FAILED, f"not written: {reason}") for reason in refused]
    return SweepResult(folder.title, folder.path, sweep, ran, verdicts, commits, now, notes)


def _ran(folder: SweepFolder, job_state: JobState) -> JobResult:
    job, run_dir = job_state.job, Path(job_state.job.run_dir)
    failures = [submission.after for submission in folder.submissions(job.name) if submission.after]
    if job_state.state in ("failed", "missing"):
        failures.append(why_failed(job_state))
    failures = [[NOT_TEXT.sub("?", line) for line in lines] for lines in failures]
    seconds = measure(run_dir).seconds if job.run is not None else 0.0
    restarts = max(0, len(all_attempts(run_dir)) - job_state.tries)
    return JobResult(job, job_state.state, job_state.tries, failures, restarts, seconds)


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
    notes, stored = [], sweep.baseline.runs if sweep.baseline else {}
    for run in (run for run in sweep.suite.runs if run in stored):
        before, now = set(stored[run].overrides), set(_overrides(jobs, run))
        if before != now:
            changes = [f"{sign}{key}" for sign, keys in (("+", now - before), ("-", before - now)) for key in sorted(keys)]
            notes.append(f"{run} has other overrides than in the baseline: {' '.join(changes)}")
    return notes


def _overrides(jobs: list[SweepJob], run: str) -> list[str]:
    """Return the overrides of a run, without seed, run_dir and cluster keys."""
    job = next(job for job in jobs if job.run == run)
    by_key = {text.partition("=")[0]: text for text in job.overrides}
    return [text for key, text in by_key.items() if not re.fullmatch(r"run_dir|cluster\..*|.*\.seed", key)]


def _new_baseline(folder: SweepFolder, sweep: Sweep, ran: list[JobResult], commits: list[str]) -> tuple[Baseline, list[str]]:
    """Return (the sweep's values as a baseline, the reasons not to write it).

    The reasons are runs that did not complete, gates that do not need a baseline and did not pass, and values that are missing.
    """
    cases = [case for run in sweep.suite.runs for case in sweep.cases(run)]
    independent = [case.verdict() for case in cases if not case.needs_baseline]
    completions = [job.completes() for job in ran]
    bad = [verdict for verdict in [*completions, *independent] if verdict.outcome is not GateResult.PASSED]
    problems = [f"{verdict.run}, {verdict.gate}: {verdict.message}" for verdict in bad]
    runs: dict[str, StoredRun] = {}
    for run in sweep.suite.runs if not bad else ():
        stored = runs[run] = StoredRun(_hardware(sweep, run), _overrides(folder.plan.jobs, run))
        for case in [case for case in sweep.cases(run) if case.needs_baseline]:
            try:
                stored.gates[case.name] = case.to_store()
            except (GateSkipped, NoValue) as error:
                problems.append(f"{run}, {case.name}: {error}")
            for metric in case.metrics:
                seeds = [measured.curves[metric] for measured in sweep.runs[run].values() if metric in measured.curves]
                stored.curves[metric] = baselines.stored_curve(seeds)
    commit = commits[0] if len(commits) == 1 else ""
    date = datetime.now(UTC).date().isoformat()
    provenance = Provenance(folder.title, date, commit.partition(",")[0] or None, "changed" in commit)
    return Baseline(provenance, runs), problems


def _hardware(sweep: Sweep, run: str) -> str | None:
    try:
        return hardware(sweep.runs[run].values())
    except GateSkipped:
        return None


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
    verdicts = []
    for verdict in result.verdicts:
        values = {**asdict(verdict), "outcome": verdict.outcome.value}
        verdicts.append({"said" if key == "message" else key: value for key, value in values.items()})
    value = {"passed": result.passed, "summary": result.summary, "judged": result.judged, "commits": result.commits}
    small_files.write(result.folder / "verdict.json", {**value, "notes": result.notes, "verdicts": verdicts})
