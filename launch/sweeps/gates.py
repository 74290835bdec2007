"""Evaluate the gates of a run over its seeds. Kinds: bounds, baseline bands, speeds, bitwise equality, paired evaluations.

A gate fails if an input is missing, such as a metric, a finite value or the gate's entry in the baseline. A gate is skipped,
and reported as `not judged`, if the run did not complete (which fails the suite anyway). A gate on speed is also skipped if the
run's hardware is unknown, differs between seeds, or is not the baseline's.

A baseline is the numbers of a sweep that passed, as YAML for Git. It holds, for each run, the value of each gate with each seed
and, for the report, the mean curve over the seeds of each metric that a gate reads. Keys are sorted, with one number a line.
The provenance is recorded: commit, date, seeds, hardware.
"""

from __future__ import annotations

import fnmatch
import hashlib
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from launch.runs import evaluation_folder, run_setup, suites
from launch.runs.evaluation_comparison import is_lower_better
from launch.runs.evaluation_folder import EvaluationFolder
from launch.runs.run_folder import RunFolder
from launch.runs.score_tables import SCORES
from launch.sweeps.expressions import Curve, Expression, NoValue, RunMeasurements, by_step
from launch.sweeps.suite import BASELINE, EvaluationGateConfig, GateConfig, Suite
from pipeline.config import config_tree, refuse, schema_validation, yaml_text
from pipeline.evaluation.statistics import difference
from pipeline.files.storage import write_durably
from pipeline.observe.metrics import NOT_REPRODUCIBLE
from pipeline.recipe.values import MISSING, Bool, Float, Int, Text

DIGITS = 12  # of a question's hash
HEADER = "# Written by `python launch/sweep.py ... update_baseline=true`. Bands and speeds of the sweep compare with it.\n"
MAX_POINTS = 40
"""Maximum number of points of a stored curve."""
UPDATE = "update_baseline=true writes it"
REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {
    "each": statistics.fmean,  # of the values that a band or a ratio compares with
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}


# ---- the baseline -----------------------------------------------------------------------------------------------------


@dataclass
class Provenance:
    """The sweep and the code that a baseline comes from."""

    sweep: Text = MISSING  # the suite's name and the sweep's id
    date: Text = MISSING
    commit: Text | None = None  # of the code that ran; null if it was no Git checkout
    dirty: Bool = False  # whether the code had changes


@dataclass
class StoredGate:
    """Holds a gate's value with each seed, and its expression, because values of different expressions cannot be compared."""

    value: Text = MISSING
    relative_to: Text | None = None
    seeds: dict[str, Float] = field(default_factory=dict)
    questions: dict[str, list[Float]] = field(default_factory=dict)  # of a paired gate: values by a hash of the question


@dataclass
class StoredCurve:
    """Holds the mean and the standard deviation over the seeds at each step."""

    steps: list[Int] = field(default_factory=list)
    mean: list[Float] = field(default_factory=list)
    spread: list[Float] = field(default_factory=list)


@dataclass
class StoredRun:
    """The gates and curves of one run."""

    hardware: Text | None = None  # null if the runs did not record it
    overrides: list[Text] = field(default_factory=list)  # of the recipe, to find later changes
    gates: dict[str, StoredGate] = field(default_factory=dict)
    curves: dict[str, StoredCurve] = field(default_factory=dict)


@dataclass
class Baseline:
    """Holds the numbers of each run of a sweep that passed."""

    provenance: Provenance = field(default_factory=Provenance)
    runs: dict[str, StoredRun] = field(default_factory=dict)

    def of(self, run: str) -> StoredRun:
        """Return a run's numbers; an empty StoredRun if the baseline lacks the run."""
        return self.runs.get(run, StoredRun())


def read_baseline(path: Path) -> Baseline | None:
    """Return the baseline in a file; None if the file does not exist yet. Raises RecipeError for an invalid file."""
    if not path.exists():
        return None
    tree = config_tree.load_with_parents(path)
    baseline, wrong = schema_validation.validate_tree(Baseline, schema_validation.with_defaults(Baseline, tree))
    refuse(problem.within(f"baseline {path}") for problem in [*schema_validation.unknown_keys(Baseline, tree), *wrong])
    return baseline


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write a baseline, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, HEADER + yaml_text.dump(_sort(asdict(baseline))))


def stored_curve(seeds: Iterable[Curve]) -> StoredCurve:
    """Return the mean and the standard deviation of the seeds' curves, thinned to MAX_POINTS."""
    values = by_step(seeds)
    steps = [*values]
    count = min(MAX_POINTS, len(steps))
    points = [steps[i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]
    mean, deviation = ([float(f"{reduce(values[step]):.4g}") for step in points] for reduce in (statistics.fmean, spread))
    return StoredCurve(points, mean, deviation)


def _sort(value: object) -> object:
    """Return the value with all keys sorted, at every level; keys that are seeds are sorted as numbers."""
    if isinstance(value, Mapping):
        return {key: _sort(value[key]) for key in sorted(value, key=lambda key: (int(key) if key.isdigit() else -1, key))}
    return value


def spread(values: Iterable[float]) -> float:
    """Return the sample standard deviation; 0 for a single value."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else 0.0


# ---- the gates --------------------------------------------------------------------------------------------------------


class GateResult(Enum):
    """The outcome of a gate; NOT_JUDGED means that the gate was skipped."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Limits:
    """The closed range of values that pass; an end that is None does not limit."""

    low: float | None = None
    high: float | None = None

    def contains(self, value: float) -> bool:
        """Return whether a value is within the limits."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.low == self.high:
            return f"{self.low:g} exactly"
        ends = (("at least", self.low), ("at most", self.high))
        return " and ".join(f"{name} {end:.4g}" for name, end in ends if end is not None)


@dataclass(frozen=True)
class Verdict:
    """Holds the outcome of one gate."""

    run: str
    gate: str
    outcome: GateResult
    message: str  # the values found and expected
    values: Mapping[int, float] = field(default_factory=dict)  # by seed
    limits: Limits = Limits()


class GateSkipped(ValueError):
    """Raised if a gate is skipped. The message says why."""


@dataclass(frozen=True)
class Sweep:
    """The inputs of all gates: suite, measurements, baseline."""

    suite: Suite
    runs: Mapping[str, Mapping[int, RunMeasurements]]  # run -> seed -> measurements; only completed runs
    baseline: Baseline | None

    def seeds(self, run: str) -> dict[int, RunMeasurements]:
        """Return seed -> its measurements, for a run. Raises GateSkipped if the run did not complete with every seed."""
        seeds, complete = sorted(self.suite.seeds_of(run)), self.runs.get(run, {})
        if missing := [seed for seed in seeds if seed not in complete]:
            raise GateSkipped(f"{run} did not complete with seed {', '.join(map(str, missing))}")
        return {seed: complete[seed] for seed in seeds}

    def hardware(self, run: str) -> str:
        """Return the hardware that all seeds ran on. Raises GateSkipped if it is unknown, or differs between seeds."""
        kinds = {measured.hardware or "" for measured in self.seeds(run).values()}
        if "" in kinds:
            raise GateSkipped("a run did not record its hardware, so its speed cannot be compared")
        if len(kinds) > 1:
            raise GateSkipped(f"the seeds ran on different hardware: {' | '.join(sorted(kinds))}")
        return kinds.pop()

    def cases(self, run: str) -> list[GateCase]:
        """Return the gates of a run, in the suite's order."""
        return [GateCase(self, run, name, gate) for name, gate in self.suite.gates_of(run).items()]


def judge(sweep: Sweep) -> list[Verdict]:
    """Return the verdict of every gate of every run, in the suite's order."""
    return [case.verdict() for run in sweep.suite.runs for case in sweep.cases(run)]


@dataclass(frozen=True)
class GateCase:
    """One gate of one run."""

    sweep: Sweep
    run: str
    name: str
    gate: GateConfig

    @property
    def expression(self) -> str:
        """The expression over metrics, or a text that names the score, that the gate evaluates. Not for a same_as gate."""
        if evaluation := self.gate.evaluation:
            return f"{evaluation.metric or 'score'} of {evaluation.task} in {evaluation.suite}"
        assert self.gate.value is not None, "`suite.problems` requires it"
        return self.gate.value

    @property
    def metrics(self) -> list[str]:
        """The metrics that the gate's expression reads; [] without an expression."""
        return Expression(self.gate.value).metrics if self.gate.value else []

    @property
    def relative_to(self) -> str | None:
        """The run by whose values this run's values are divided; None if the gate is not a relative speed."""
        return self.gate.speed.relative_to if self.gate.speed else None

    @property
    def over(self) -> str:
        """The name of the reduction of the values of all seeds to one; `each` if the value of every seed is compared."""
        return self.gate.over or {"bounds": "each", "band": "mean", "speed": "median"}[self.gate.kind]

    def verdict(self) -> Verdict:
        """Evaluate the gate, and return its verdict."""
        outcome, values, limits = GateResult.PASSED, {}, Limits()
        try:
            if self.gate.same_as is not None:
                message = self._same()
            else:
                values = self.values()
                if self.gate.kind == "paired":
                    message = self._not_worse()
                else:
                    limits, expected = {"bounds": self._bounds, "band": self._band, "speed": self._speed}[self.gate.kind]()
                    outcome, message = self._compare(values, limits, expected)
        except GateSkipped as reason:
            outcome, message = GateResult.NOT_JUDGED, str(reason)
        except NoValue as reason:
            outcome, message = GateResult.FAILED, str(reason)
        return Verdict(self.run, self.name, outcome, message, values, limits)

    def _compare(self, values: Mapping[int, float], limits: Limits, expected: str) -> tuple[GateResult, str]:
        """Return whether the values, or their reduction, are within the limits, and the message of the verdict."""
        if self.over == "each":
            bad = {seed: value for seed, value in values.items() if not limits.contains(value)}
            text = ", ".join(f"seed {seed}: {value:.4g}" for seed, value in (bad or values).items())
        else:
            value = self._reduced(values)
            bad, text = not limits.contains(value), f"{value:.4g}, {self.over} of the seeds"
        step = self._departure() if bad else None
        since = "" if step is None else f"; outside the baseline's curve from step {step} on"
        return GateResult.FAILED if bad else GateResult.PASSED, f"{text}; {expected}{since}"

    # ---- the values -----------------------------------------------------------------------------------------------------

    def values(self) -> dict[int, float]:
        """Return seed -> value. A relative gate's values are divided by those of another run. Raises NoValue, GateSkipped."""
        values = self._values_of(self.run)
        if self.relative_to is None:
            return values
        divisors = self._values_of(self.relative_to)
        if 0 in divisors.values():
            raise NoValue(f"{self.expression} of {self.relative_to} is 0")
        return {seed: value / divisors[seed] for seed, value in values.items()}

    def _values_of(self, run: str) -> dict[int, float]:
        if evaluation := self.gate.evaluation:
            return {seed: _score(folder, evaluation) for seed, folder in self._evaluations(run, evaluation).items()}
        expression, values = Expression(self.expression), {}
        for seed, measured in self.sweep.seeds(run).items():
            try:
                values[seed] = expression.value(measured.curves)
            except NoValue as error:
                raise NoValue(f"{self.expression} of {run} has no value with seed {seed}: {error}") from None
        return values

    def _reduced(self, values: Mapping[Any, float]) -> float:
        return REDUCTIONS[self.over](values.values())

    # ---- limits ---------------------------------------------------------------------------------------------------------

    def _bounds(self) -> tuple[Limits, str]:
        exact = self.gate.equals
        limits = Limits(self.gate.at_least, self.gate.at_most) if exact is None else Limits(exact, exact)
        return limits, f"expected {limits}"

    def _band(self) -> tuple[Limits, str]:
        assert self.gate.band is not None
        stored = self._stored_gate()[1].seeds
        middle, half = self._reduced(stored), self.gate.band.spreads * max(spread(stored.values()), self.gate.band.floor)
        better = self.gate.band.better
        limits = Limits(None if better == "lower" else middle - half, None if better == "higher" else middle + half)
        above = self._reduced(self.values()) - middle
        ahead = {"higher": above, "lower": -above, "neither": 0.0}[better] > half
        hint = "; better than the whole band: try update_baseline=true" if ahead else ""
        return limits, f"expected {limits} (baseline {middle:.4g}, band {half:.3g}{hint})"

    def _speed(self) -> tuple[Limits, str]:
        assert self.gate.speed is not None
        of_run, stored = self._stored_gate()
        if self.relative_to is None and (now := self.sweep.hardware(self.run)) != of_run.hardware:
            raise GateSkipped(f"ran on {now}; expected the baseline's hardware: {of_run.hardware or 'unknown'}")
        middle = self._reduced(stored.seeds)
        if middle <= 0:
            raise NoValue(f"the baseline is {middle:g}; expected a positive number, to compare a ratio")
        ratios = Limits(self.gate.speed.at_least, self.gate.speed.at_most)
        limits = Limits(*(None if ratio is None else ratio * middle for ratio in (ratios.low, ratios.high)))
        times = self._reduced(self.values()) / middle
        reference = f"the baseline's {middle:.4g}" + (f", both relative to {self.relative_to}" if self.relative_to else "")
        return limits, f"{times:.3g} times {reference}; expected {ratios} times"

    def _departure(self) -> int | None:
        """Return the step from which on the mean over the seeds is outside the baseline's band; None if there is none.

        The band at a step is around the baseline's curve. Only a gate with a band over a single metric has such a step.
        """
        if self.gate.band is None or len(self.metrics) != 1:
            return None
        (metric,), first = self.metrics, None
        before = self._stored_gate()[0].curves.get(metric)
        now = by_step(measured.curves[metric] for measured in self.sweep.seeds(self.run).values())
        for step, middle, width in reversed([*zip(before.steps, before.mean, before.spread, strict=True)] if before else []):
            half = self.gate.band.spreads * max(width, self.gate.band.floor)
            if step not in now or abs(statistics.fmean(now[step]) - middle) <= half:
                break
            first = step
        return first

    # ---- the baseline ---------------------------------------------------------------------------------------------------

    def _stored_gate(self) -> tuple[StoredRun, StoredGate]:
        """Return (run, gate) of the baseline. Raises NoValue if this gate cannot be compared with the baseline."""
        if self.sweep.baseline is None:
            raise NoValue(f"there is no baseline yet; {UPDATE}")
        of_run = self.sweep.baseline.of(self.run)
        stored = of_run.gates.get(self.name)
        if stored is None or not stored.seeds:
            raise NoValue(f"the baseline does not have this gate; {UPDATE}")
        if stored.value != self.expression:
            raise NoValue(f"the baseline stores {stored.value}; expected {self.expression}; {UPDATE}")
        if stored.relative_to != self.relative_to:
            before, now = (f"relative to {run}" if run else "absolute" for run in (stored.relative_to, self.relative_to))
            raise NoValue(f"the baseline is {before}; expected {now}; {UPDATE}")
        return of_run, stored

    def to_store(self) -> StoredGate:
        """Return the entry of this gate for a new baseline. Raises NoValue, GateSkipped."""
        seeds = {str(seed): value for seed, value in self.values().items()}
        questions = self._questions(self.run) if self.gate.kind == "paired" else {}
        return StoredGate(self.expression, self.relative_to, seeds, questions)

    # ---- evaluations, question by question ------------------------------------------------------------------------------

    def _evaluations(self, run: str, gate: EvaluationGateConfig) -> dict[int, EvaluationFolder]:
        """Return seed -> the evaluation of the run's checkpoint with that seed. Raises NoValue, GateSkipped."""
        folders = {seed: measured.folder for seed, measured in self.sweep.seeds(run).items()}
        return {seed: _evaluation_of(folder, gate) for seed, folder in folders.items() if folder is not None}

    def _questions(self, run: str) -> dict[str, list[float]]:
        """Return hash of a question's id -> the values of its samples in the evaluations of all seeds.

        run: a run of the sweep, or the folder of an evaluation.
        """
        gate, samples = self.gate.evaluation, {}
        assert gate is not None, "a paired gate has one"
        in_sweep = run in self.sweep.suite.runs
        for evaluation in self._evaluations(run, gate).values() if in_sweep else [_evaluation_in(Path(run), gate)]:
            for question, values in evaluation.values(gate.task, gate.metric).items():
                digest = hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
                samples.setdefault(f"q{digest}", []).extend(values)
        return dict(sorted(samples.items()))

    def _not_worse(self) -> str:
        """Check that the scores are not worse than the reference's, question by question over all seeds.

        Return the message of a gate that passes. Raises NoValue.
        """
        evaluation = self.gate.evaluation
        assert evaluation is not None and evaluation.not_worse_than is not None, "a paired gate has both"
        reference = evaluation.not_worse_than
        before = self._stored_gate()[1].questions if reference == BASELINE else self._questions(reference)
        first = next(iter(self._evaluations(self.run, evaluation).values()))
        lower = is_lower_better(evaluation.metric or first.tasks[evaluation.task]["metric"])
        if lower is None:  # of a suite that names no metric
            raise NoValue("neither a lower nor a higher value is better; expected at_least and at_most")
        change = difference(before, self._questions(self.run), lower)
        if not change.questions:
            raise NoValue(f"has no question in common with {reference}")
        ends = f"{change.shown} against {reference}"
        message = f"{change.verdict}: {ends}, p = {change.p_value:.2g}, {change.questions} questions"
        if evaluation.margin is None and change.verdict == "worse":
            raise NoValue(f"{message}; expected no loss")
        if evaluation.margin is not None and not (change.high if lower else -change.low) <= evaluation.margin:  # NaN fails
            raise NoValue(f"{message}; expected a loss of at most {evaluation.margin:g} in the whole confidence interval")
        return message

    # ---- to the last bit ------------------------------------------------------------------------------------------------

    def _same(self) -> str:
        """Check that every reproducible metric equals that of the reference run, to the last bit.

        Return the message of a gate that passes. Raises NoValue at the first difference.
        """
        assert self.gate.same_as is not None
        reference, patterns, compared = self.gate.same_as.run, self.gate.same_as.metrics, 0
        reference_seeds = self.sweep.seeds(reference)
        for seed, measured in self.sweep.seeds(self.run).items():
            texts, expected = _texts(measured.curves, patterns), _texts(reference_seeds[seed].curves, patterns)
            if not texts:
                raise NoValue(f"seed {seed} has no metric that matches {' or '.join(patterns)}")
            if alone := sorted(texts.keys() ^ expected.keys()):
                raise NoValue(f"seed {seed}: only one of {self.run} and {reference} has {alone[0]}")
            if different := [(step, name) for name in texts for step, _ in texts[name].items() ^ expected[name].items()]:
                step, name = min(different)
                value, other_value = (values[name].get(step, "missing") for values in (texts, expected))
                raise NoValue(f"seed {seed}: {name} is {value} at step {step}, and {other_value} in {reference}")
            compared += sum(map(len, texts.values()))
        return f"{compared} values are bitwise equal to the values of {reference}"


def _texts(curves: Mapping[str, Curve], patterns: list[str]) -> dict[str, dict[int, str]]:
    """Return metric -> step -> text of its value, for the metrics that match a pattern and that an equal run reproduces."""
    return {
        name: dict(zip(curve.steps, map(repr, curve.values), strict=True))
        for name, curve in curves.items()
        if not name.startswith(NOT_REPRODUCIBLE) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


# ---- scores -------------------------------------------------------------------------------------------------------------


def evaluations(run_dir: Path, gate: EvaluationGateConfig) -> tuple[int | None, list[EvaluationFolder]]:
    """Return (the step of the checkpoint that a gate reads, the run's evaluations of it). An evaluation itself has no step."""
    step = run_setup.done_step(run_dir) if gate.step is None else gate.step
    if RunFolder.at(run_dir).algorithm == "evaluate":
        step = None
    wanted = suites.find(gate.suite)[0], step
    of_run = evaluation_folder.of_run(run_dir)
    return step, [evaluation for evaluation in of_run if (evaluation.suite, evaluation.step) == wanted]


def _evaluation_of(run_dir: Path, gate: EvaluationGateConfig) -> EvaluationFolder:
    """Return the evaluation of a run that a gate reads. Raises NoValue if the evaluation or its task is missing."""
    step, existing = evaluations(run_dir, gate)
    if not existing:
        name, at = suites.find(gate.suite)[0], "" if step is None else f" at step {step}"
        raise NoValue(f"{run_dir} has no evaluation with the suite {name}{at}")
    return _evaluation_in(existing[-1].folder, gate)


def _evaluation_in(folder: Path, gate: EvaluationGateConfig) -> EvaluationFolder:
    """Return the evaluation in a folder. Raises NoValue if the evaluation or the gate's task is missing."""
    evaluation = evaluation_folder.read(folder)
    if evaluation is None:
        raise NoValue(f"{folder} has no {SCORES}")
    if gate.task not in evaluation.tasks:
        raise NoValue(f"{evaluation.folder} has no task {gate.task}; it has {', '.join(evaluation.tasks) or 'none'}")
    return evaluation


def _score(evaluation: EvaluationFolder, gate: EvaluationGateConfig) -> float:
    """Return the score that a gate reads from an evaluation. Raises NoValue."""
    task = evaluation.tasks[gate.task]
    metric = gate.metric or task["metric"]
    value = task["metrics"].get(metric, {}).get("value")
    if value is None:
        raise NoValue(f"{evaluation.folder}: {gate.task} has no {metric}; it has {', '.join(task['metrics']) or 'none'}")
    return value
