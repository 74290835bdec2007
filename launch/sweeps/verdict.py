"""Evaluate the gates of a sweep that has ended, write a new baseline if it was requested, and write the reports.

Each run has a gate `completes`. It fails the suite if the run did not complete, and its message is the first failure.

The reports are verdict.json, Markdown, JUnit XML for CI tools, and an HTML page. The page shows failed gates with their curves,
all gates, all curves, the runs and their failures. A chart shows each seed, the range of all seeds, and the baseline's mean
with its standard deviation.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict
from xml.etree import ElementTree

from launch.drawing.html import table, tag
from launch.executors.executor import ROOT
from launch.pages.chart import Chart, Series, figures
from launch.pages.document import Section, add_plotly, details, document
from launch.runs import run_files
from launch.runs.attempts import all_attempts
from launch.sweeps import gates
from launch.sweeps import suite as suites
from launch.sweeps.expressions import Expression, NoValue, RunMeasurements, by_step, measure
from launch.sweeps.gates import Baseline, GateResult, GateSkipped, Provenance, StoredRun, Sweep, Verdict
from launch.sweeps.submission import main_line, why_failed
from launch.sweeps.suite import Suite
from launch.sweeps.sweep_folder import JobState, SweepFolder, SweepJob
from launch.terminal.safe_text import on_one_line
from pipeline.files import small_files
from pipeline.files.storage import write_durably

COMPLETES = "completes"
NOT_TEXT = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML forbids, such as escape codes in logs: https://www.w3.org/TR/xml/#charsets."""
SIGNS = {GateResult.PASSED: "✅", GateResult.FAILED: "❌", GateResult.NOT_JUDGED: "⚠️ not judged"}
CLASSES = {GateResult.PASSED: "good", GateResult.FAILED: "bad", GateResult.NOT_JUDGED: "warn"}
RUNS = ("this sweep", "baseline")
NOW, BEFORE = 0, 1  # indices in RUNS


@dataclass(frozen=True)
class JobResult:
    """Holds the outcome of one job, for the reports."""

    job: SweepJob
    state: str
    tries: int
    why: list[list[str]]  # why each failed try failed, in lines
    restarts: int  # without a new submission: after a crash, the time limit or preemption
    seconds: float

    @classmethod
    def of(cls, folder: SweepFolder, job_state: JobState) -> JobResult:
        """Return the outcome of a job of a sweep."""
        job, run_dir = job_state.job, Path(job_state.job.run_dir)
        failures = [submission.after for submission in folder.submissions(job.name) if submission.after]
        if job_state.state in ("failed", "missing"):
            failures.append(why_failed(job_state))
        failures = [[NOT_TEXT.sub("?", line) for line in lines] for lines in failures]
        restarts = max(0, len(all_attempts(run_dir)) - job_state.tries)
        return cls(job, job_state.state, job_state.tries, failures, restarts, measure(run_dir).seconds if job.run else 0.0)

    @property
    def completes(self) -> Verdict:
        """The verdict of the gate `completes`."""
        outcome = GateResult.FAILED
        if self.state == "done":
            outcome = GateResult.PASSED
            message = f"RETRIED: done at try {self.tries}; before: {main_line(self.why[0])}" if self.why else "done"
        elif self.state == "live":
            message = "has not ended yet"
        else:
            message = (f"failed {len(self.why)} times, first: " if len(self.why) > 1 else "") + main_line(self.why[0])
        restarts = f"; its ranks were restarted {self.restarts} times" if self.restarts else ""
        gate = COMPLETES if self.job.seed is None else f"seed {self.job.seed} {COMPLETES}"
        return Verdict(self.job.run or self.job.name, gate, outcome, message + restarts)

    @property
    def row(self) -> list[str]:
        """The cells of the job in a table: name, state, tries, restarts, seconds."""
        return [self.job.name, self.state, str(self.tries), str(self.restarts), f"{self.seconds:.0f}"]


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
    def versions(self) -> str:
        """The commits of the code that ran, and the provenance of the baseline."""
        origin = self.sweep.baseline and self.sweep.baseline.provenance
        known = origin and f"the baseline is from {origin.date}, {origin.sweep}, commit {origin.commit or 'unknown'}"
        return f"commit {' and '.join(self.commits) or 'unknown'}; {known or 'there is no baseline'}"


# ---- the evaluation of the gates ----------------------------------------------------------------------------------------


def conclude(folder: SweepFolder) -> SweepResult:
    """Evaluate the gates of a sweep, and write a new baseline if it was requested.

    Raises RecipeError for an invalid baseline.
    """
    plan, suite, job_states = folder.plan, folder.suite, folder.job_states()
    complete = [state.job for state in job_states if state.state == "done" and state.job.run is not None]
    for job in complete:
        _evaluate_missing(suite, job, folder.path / "evaluate.log")
    runs: dict[str, dict[int, RunMeasurements]] = {run: {} for run in suite.runs}
    for job in complete:
        assert job.run is not None and job.seed is not None, "a run's job has both"
        runs[job.run][job.seed] = measure(Path(job.run_dir))
    ran = [JobResult.of(folder, state) for state in job_states]
    sweep = Sweep(suite, runs, gates.read_baseline(Path(plan.baseline)))
    commits, notes, refused = _commits(plan.jobs), [], []
    if plan.update_baseline:
        renewed, refused = _new_baseline(folder, sweep, ran, commits)
        if not refused:
            gates.write_baseline(renewed, Path(plan.baseline))
            sweep = replace(sweep, baseline=renewed)
            notes.append(f"wrote a new baseline: {plan.baseline}")
    if len(commits) > 1:
        notes.append(f"the runs used different versions of the code: {', '.join(commits)}")
    notes += _change_notes(sweep, plan.jobs)
    verdicts = [*(job.completes for job in ran), *gates.judge(sweep)]
    verdicts += [Verdict("baseline", "update_baseline", GateResult.FAILED, f"not written: {reason}") for reason in refused]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return SweepResult(folder.title, folder.path, sweep, ran, verdicts, commits, now, notes)


def _evaluate_missing(suite: Suite, job: SweepJob, log: Path) -> None:
    """Evaluate the checkpoints of a complete run whose scores gates need and do not have yet, one after another.

    A failed evaluation raises nothing; its gate fails later. The output of launch/evaluate.py goes into `log`.
    """
    for command in dict.fromkeys(missing_evaluations(suite, job.run, Path(job.run_dir))):
        print(on_one_line(f"evaluates {' '.join(command)}"), flush=True)
        with open(log, "ab") as output:
            program = [sys.executable, "-u", str(ROOT / "launch/evaluate.py"), *command]
            status = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
        if status:
            print(f"the evaluation ended with status {status}: {log}", flush=True)


def missing_evaluations(suite: Suite, run: str | None, run_dir: Path) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of launch/evaluate.py for each evaluation of a run that gates need and that does not exist."""
    for name in suite.runs:
        for gate in suite.gates_of(name).values():
            if (evaluation := gate.evaluation) and run in (name, evaluation.not_worse_than):
                step, existing = gates.evaluations(run_dir, evaluation)
                if step is not None and not existing:
                    yield f"suite={evaluation.suite}", f"run={run_dir}", f"step={step}"


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
    independent = [*(job.completes for job in ran), *(case.verdict() for case in cases if not case.gate.needs_baseline)]
    bad = [verdict for verdict in independent if verdict.outcome is not GateResult.PASSED]
    problems = [f"{verdict.run}, {verdict.gate}: {verdict.message}" for verdict in bad]
    runs: dict[str, StoredRun] = {}
    for run in sweep.suite.runs if not bad else ():
        stored = runs[run] = StoredRun(overrides=_overrides(folder.plan.jobs, run))
        with contextlib.suppress(GateSkipped):
            stored.hardware = sweep.hardware(run)
        for case in [case for case in sweep.cases(run) if case.gate.needs_baseline]:
            try:
                stored.gates[case.name] = case.to_store()
            except (GateSkipped, NoValue) as error:
                problems.append(f"{run}, {case.name}: {error}")
            for metric in case.metrics:
                seeds = [measured.curves[metric] for measured in sweep.runs[run].values() if metric in measured.curves]
                stored.curves[metric] = gates.stored_curve(seeds)
    commit = commits[0] if len(commits) == 1 else ""
    date = datetime.now(UTC).date().isoformat()
    provenance = Provenance(folder.title, date, commit.partition(",")[0] or None, "changed" in commit)
    return Baseline(provenance, runs), problems


# ---- reports ------------------------------------------------------------------------------------------------------------


class GateOutcome(TypedDict):
    """The outcome of a gate in verdict.json. The file has further keys, which are not read."""

    run: str
    gate: str
    outcome: str
    said: str  # the values found and expected


class StoredVerdict(TypedDict):
    """The contents of verdict.json of a sweep or a search."""

    passed: bool
    summary: str
    verdicts: list[GateOutcome]


def read(folder: Path) -> StoredVerdict | None:
    """Return the verdict.json in a sweep's folder; None before the gates are checked. Raises RecipeError if it is damaged."""
    return small_files.read(folder / "verdict.json", StoredVerdict, "check", "Try to delete it: the next check writes it anew")


def write(result: SweepResult) -> None:
    """Write all reports into the sweep's folder; last verdict.json, which marks the sweep as complete."""
    write_durably(result.folder / "junit.xml", junit(result))
    write_durably(result.folder / "report.md", markdown(result))
    write_durably(result.folder / "report.html", page(result))
    add_plotly(result.folder)
    verdicts = []
    for verdict in result.verdicts:
        values = {**asdict(verdict), "outcome": verdict.outcome.value}
        verdicts.append({"said" if key == "message" else key: value for key, value in values.items()})
    value = {"passed": result.passed, "summary": result.summary, "judged": result.judged, "commits": result.commits}
    small_files.write(result.folder / "verdict.json", {**value, "notes": result.notes, "verdicts": verdicts})


def markdown(result: SweepResult) -> str:
    """Return the report as Markdown: failed gates, all gates, the runs."""
    parts = [f"# {result.title}: {'passed' if result.passed else 'failed'}", "", f"{result.summary}."]
    verdicts = [(row.run, row.gate, SIGNS[row.outcome], row.message) for row in result.verdicts]
    runs = [(*ran.row, "; ".join(map(main_line, ran.why))) for ran in result.ran]
    sections = {
        "Failed": [f"- **{verdict.run}, {verdict.gate}**: {_plain(verdict.message)}" for verdict in result.failed],
        "Notes": [f"- {_plain(note)}" for note in result.notes],
        "Gates": _markdown_table(("run", "gate", "", "found and expected"), verdicts),
        "Runs": _markdown_table(("run", "", "tries", "restarts", "seconds", "failures"), runs),
    }
    for title, lines in sections.items():
        parts += ["", f"## {title}", "", *lines] if lines else []
    return "\n".join([*parts, "", f"Evaluated {result.judged}, {result.versions}.", ""])


def _markdown_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [header, tuple("---" for _ in header), *rows]
    return [f"| {' | '.join(_plain(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def _plain(text: str) -> str:
    """Return a text on one line, with Markdown characters escaped."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'")


def junit(result: SweepResult) -> str:
    """Return JUnit XML with a test suite for each run and a test case for each gate: https://github.com/testmoapp/junitxml."""
    name = result.sweep.suite.name
    root = ElementTree.Element("testsuites", _counts(f"{name} {result.folder.name}", result.verdicts, result.ran))
    for run in dict.fromkeys(verdict.run for verdict in result.verdicts):
        cases = [verdict for verdict in result.verdicts if verdict.run == run]
        ran = [outcome for outcome in result.ran if (outcome.job.run or outcome.job.name) == run]
        suite = ElementTree.SubElement(root, "testsuite", {**_counts(f"{name}.{run}", cases, ran), "timestamp": result.judged})
        pairs = [("commit", commit) for commit in result.commits]
        pairs += [("retried", outcome.job.name) for outcome in ran if outcome.tries > 1]
        pairs += [("restarts", f"{outcome.job.name}: {outcome.restarts}") for outcome in ran if outcome.restarts]
        if pairs:
            properties = ElementTree.SubElement(suite, "properties")
            for key, value in pairs:
                ElementTree.SubElement(properties, "property", {"name": key, "value": value})
        for verdict in cases:
            _case(suite, f"{name}.{run}", verdict, ran)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(name: str, cases: list[Verdict], ran: list[JobResult]) -> dict[str, str]:
    failed = sum(verdict.outcome is GateResult.FAILED for verdict in cases)
    skipped = sum(verdict.outcome is GateResult.NOT_JUDGED for verdict in cases)
    counts = {"tests": len(cases), "failures": failed, "errors": 0, "skipped": skipped}
    seconds = sum(outcome.seconds for outcome in ran)
    return {"name": name, **{key: str(value) for key, value in counts.items()}, "time": f"{seconds:.3f}"}


def _case(suite: ElementTree.Element, run: str, verdict: Verdict, ran: list[JobResult]) -> None:
    job = next((outcome for outcome in ran if outcome.completes.gate == verdict.gate), None)
    attributes = {"classname": run, "name": verdict.gate, "time": f"{job.seconds if job else 0.0:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    lines = [verdict.message, *(f"seed {seed}: {value!r}" for seed, value in verdict.values.items())]
    if verdict.outcome is GateResult.FAILED:
        failure = ElementTree.SubElement(case, "failure", {"message": verdict.message, "type": "gate"})
        lines += ["\n\n".join("\n".join(attempt) for attempt in job.why)] if job and job.why else []
        failure.text = "\n".join(lines)
    elif verdict.outcome is GateResult.NOT_JUDGED:
        ElementTree.SubElement(case, "skipped", {"message": verdict.message})
    else:
        ElementTree.SubElement(case, "system-out").text = "\n".join(lines)


# ---- the page -----------------------------------------------------------------------------------------------------------


def page(result: SweepResult) -> str:
    """Return the report's HTML."""
    verdict = tag("span", "passed" if result.passed else "failed", class_="good" if result.passed else "bad")
    intro = tag("p", verdict, f" · {result.summary} · judged {result.judged} · {result.versions}")
    rows = [
        [row.run, row.gate, tag("span", row.outcome.value, class_=CLASSES[row.outcome]), row.message, _seeds(row)]
        for row in result.verdicts
    ]
    sections = [*_failures(result)]
    sections += [Section("Notes", [tag("ul", *(tag("li", note) for note in result.notes))])] if result.notes else []
    sections += [Section("Gates", [table(["run", "gate", "", "found and expected", "seeds"], rows)]), *_curves(result)]
    return document(result.title, [*sections, _runs(result), suite_section(result.sweep.suite)], RUNS, intro)


def suite_section(suite: Suite) -> Section:
    """Return the section of a page that shows the suite."""
    return Section("Suite", [details("suite.yaml, resolved", tag("pre", suites.to_yaml(suite)))])


def _seeds(verdict: Verdict) -> str:
    return ", ".join(f"{seed}: {value:.4g}" for seed, value in verdict.values.items())


def _failures(result: SweepResult) -> Iterator[Section]:
    if not result.failed:
        return
    rows = [[verdict.run, verdict.gate, verdict.message, _seeds(verdict)] for verdict in result.failed]
    broken = {(verdict.run, verdict.gate) for verdict in result.failed}
    charts = []
    for run in result.sweep.suite.runs:
        metrics = [metric for case in result.sweep.cases(run) if (run, case.name) in broken for metric in case.metrics]
        charts += [_chart(result, run, metric, f"{run}: {metric}") for metric in dict.fromkeys(metrics)]
    content = [table(["run", "gate", "found and expected", "seeds"], rows)]
    yield Section("Failed", [*content, *([figures(charts, RUNS)] if charts else [])])


def _curves(result: SweepResult) -> Iterator[Section]:
    note = "Each seed, the band of all seeds, and the baseline's mean with its standard deviation."
    for run in result.sweep.suite.runs:
        metrics = dict.fromkeys(metric for case in result.sweep.cases(run) for metric in case.metrics)
        if metrics:
            yield Section(run, [figures([_chart(result, run, metric, metric) for metric in metrics], RUNS)], note)


def _chart(result: SweepResult, run: str, metric: str, title: str) -> Chart:
    seeds = {seed: m.curves[metric] for seed, m in sorted(result.sweep.runs[run].items()) if metric in m.curves}
    stored = result.sweep.baseline.of(run).curves.get(metric) if result.sweep.baseline else None
    series: list[Series] = []
    if stored and stored.steps:
        ends = zip(stored.mean, stored.spread, strict=True)
        low, high = zip(*((mean - spread, mean + spread) for mean, spread in ends), strict=True)
        series.append(Series("mean", stored.steps, stored.mean, BEFORE, "band", low, high))
    if len(seeds) > 1:
        values = by_step(seeds.values())
        low, high = [*map(min, values.values())], [*map(max, values.values())]
        series.append(Series("all seeds", [*values], (), NOW, "band", low, high))
    kind = "points" if metric.startswith("val/") else "line"
    series += [Series(f"seed {seed}", curve.steps, curve.values, NOW, kind) for seed, curve in seeds.items()]
    unit = "s" if metric.startswith("time/") else ""
    return Chart(title, series, unit, levels=_levels(result, run, metric), note="" if series else "no run has this metric")


def _levels(result: SweepResult, run: str, metric: str) -> list[tuple[float, str]]:
    """Return (value, label) of each limit to draw in a metric's chart: those of gates on a single statistic of the metric."""
    limits = {verdict.gate: verdict.limits for verdict in result.verdicts if verdict.run == run}
    levels = []
    for case in result.sweep.cases(run):
        if case.metrics == [metric] and Expression(case.expression).is_statistic and not case.relative_to:
            ends = (("min", limits[case.name].low), ("max", limits[case.name].high))
            levels += [(end, f"{case.name}: {name}") for name, end in ends if end is not None]
    return levels


def _runs(result: SweepResult) -> Section:
    rows, failures = [], []
    for ran in result.ran:
        name, state, *numbers = ran.row
        look = "bad" if state != "done" else "warn" if ran.tries > 1 else "good"
        shown = tag("span", "retried" if look == "warn" else state, class_=look)
        measured = result.sweep.runs.get(ran.job.run or "", {}).get(-1 if ran.job.seed is None else ran.job.seed)
        rows.append([name, shown, *numbers, (measured and measured.hardware) or ""])
        for number, lines in enumerate(ran.why, 1):
            failures.append(details(f"{name}, try {number}: {main_line(lines)}", tag("pre", "\n".join(lines))))
    return Section("Runs", [table(["run", "", "tries", "restarts", "seconds", "hardware"], rows), *failures])
