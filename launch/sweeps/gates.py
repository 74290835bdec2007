"""Evaluate the gates of a run over its seeds. Kinds: bounds, baseline bands, speeds, bitwise equality, paired evaluations.

A gate fails if an input is missing, such as a metric, a finite value or the gate's entry in the baseline. A gate is skipped,
and reported as `not judged`, if the run did not complete (which fails the suite anyway). A gate on speed is also skipped if the
run's hardware is unknown, differs between seeds, or is not the baseline's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from launch.runs.evaluation_comparison import is_lower_better
from launch.runs.evaluation_folder import EvaluationFolder
from launch.sweeps import measurements
from launch.sweeps.baseline import Baseline, StoredGate, StoredRun
from launch.sweeps.expressions import Curve, Expression, NoValue
from launch.sweeps.measurements import RunMeasurements, by_step, spread
from launch.sweeps.suite import BASELINE, EvaluationGateConfig, GateConfig, Suite, gates_of, kind, seeds_of
from pipeline.evaluation.statistics import difference

UPDATE = "update_baseline=true writes it"
REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}


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
        seeds, complete = sorted(seeds_of(self.suite, run)), self.runs.get(run, {})
        if missing := [seed for seed in seeds if seed not in complete]:
            raise GateSkipped(f"{run} did not complete with seed {', '.join(map(str, missing))}")
        return {seed: complete[seed] for seed in seeds}

    def cases(self, run: str) -> list[GateCase]:
        """Return the gates of a run, in the suite's order."""
        return [GateCase(self, run, name, gate) for name, gate in gates_of(self.suite, run).items()]


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
        return self.gate.over or {"bounds": "each", "band": "mean", "speed": "median"}[kind(self.gate)]

    @property
    def needs_baseline(self) -> bool:
        """Return whether the gate compares with the baseline."""
        evaluation = self.gate.evaluation
        return kind(self.gate) in ("band", "speed") or (evaluation is not None and evaluation.not_worse_than == BASELINE)

    def verdict(self) -> Verdict:
        """Evaluate the gate, and return its verdict."""
        outcome, values, limits = GateResult.PASSED, {}, Limits()
        try:
            if self.gate.same_as is not None:
                message = self._same()
            else:
                values = self.values()
                if kind(self.gate) == "paired":
                    message = self._not_worse()
                else:
                    limits, expected = {"bounds": self._bounds, "band": self._band, "speed": self._speed}[kind(self.gate)]()
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
            value = REDUCTIONS[self.over](values.values())
            bad, text = not limits.contains(value), f"{value:.4g}, {self.over} of the seeds"
        step = self._departure() if bad else None
        since = "" if step is None else f"; outside the baseline's curve from step {step} on"
        return GateResult.FAILED if bad else GateResult.PASSED, f"{text}; {expected}{since}"

    # ---- the values -----------------------------------------------------------------------------------------------------

    def values(self) -> dict[int, float]:
        """Return seed -> value. A relative gate's values are divided by those of another run. Raises NoValue, GateSkipped."""
        values = self._of(self.run)
        if self.relative_to is None:
            return values
        divisors = self._of(self.relative_to)
        if 0 in divisors.values():
            raise NoValue(f"{self.expression} of {self.relative_to} is 0")
        return {seed: value / divisors[seed] for seed, value in values.items()}

    def _of(self, run: str) -> dict[int, float]:
        if evaluation := self.gate.evaluation:
            return {seed: measurements.score(folder, evaluation) for seed, folder in self._evaluations(run, evaluation).items()}
        expression, values = Expression(self.expression), {}
        for seed, measured in self.sweep.seeds(run).items():
            try:
                values[seed] = expression.value(measured.curves)
            except NoValue as error:
                raise NoValue(f"{self.expression} of {run} has no value with seed {seed}: {error}") from None
        return values

    def _evaluations(self, run: str, evaluation: EvaluationGateConfig) -> dict[int, EvaluationFolder]:
        """Return seed -> the evaluation of the run's checkpoint with that seed. Raises NoValue, GateSkipped."""
        folders = {seed: measured.folder for seed, measured in self.sweep.seeds(run).items()}
        return {seed: measurements.evaluation_of(folder, evaluation) for seed, folder in folders.items() if folder is not None}

    def _middle(self, values: Iterable[float]) -> float:
        """Reduce the values of the seeds to one, as `over` says; `each` takes their mean."""
        return REDUCTIONS["mean" if self.over == "each" else self.over](values)

    # ---- limits ---------------------------------------------------------------------------------------------------------

    def _bounds(self) -> tuple[Limits, str]:
        exact = self.gate.equals
        limits = Limits(self.gate.at_least, self.gate.at_most) if exact is None else Limits(exact, exact)
        return limits, f"expected {limits}"

    def _band(self) -> tuple[Limits, str]:
        assert self.gate.band is not None
        stored = self._stored_gate()[1].seeds.values()
        middle, half = self._middle(stored), self.gate.band.spreads * max(spread(stored), self.gate.band.floor)
        better = self.gate.band.better
        limits = Limits(None if better == "lower" else middle - half, None if better == "higher" else middle + half)
        above = self._middle(self.values().values()) - middle
        ahead = {"higher": above, "lower": -above, "neither": 0.0}[better] > half
        hint = "; better than the whole band: try update_baseline=true" if ahead else ""
        return limits, f"expected {limits} (baseline {middle:.4g}, band {half:.3g}{hint})"

    def _speed(self) -> tuple[Limits, str]:
        assert self.gate.speed is not None
        of_run, stored = self._stored_gate()
        if self.relative_to is None:
            now = hardware(self.sweep.seeds(self.run).values())
            if now != of_run.hardware:
                raise GateSkipped(f"ran on {now}; expected the baseline's hardware: {of_run.hardware or 'unknown'}")
        middle = self._middle(stored.seeds.values())
        if middle <= 0:
            raise NoValue(f"the baseline is {middle:g}; expected a positive number, to compare a ratio")
        ratios = Limits(self.gate.speed.at_least, self.gate.speed.at_most)
        limits = Limits(*(None if ratio is None else ratio * middle for ratio in (ratios.low, ratios.high)))
        times = self._middle(self.values().values()) / middle
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
        evaluation = self.gate.evaluation
        questions = self._questions(self.run, evaluation) if evaluation and kind(self.gate) == "paired" else {}
        return StoredGate(self.expression, self.relative_to, seeds, questions)

    # ---- evaluations, question by question ----------------------------------------------------------------------------------

    def _questions(self, run: str, evaluation: EvaluationGateConfig) -> dict[str, list[float]]:
        return measurements.questions(self._evaluations(run, evaluation).values(), evaluation)

    def _not_worse(self) -> str:
        """Check that the scores are not worse than the reference's, question by question over all seeds.

        Return the message of a gate that passes. Raises NoValue.
        """
        evaluation = self.gate.evaluation
        assert evaluation is not None and evaluation.not_worse_than is not None, "a paired gate has both"
        reference = evaluation.not_worse_than
        if reference == BASELINE:
            before: measurements.Questions = self._stored_gate()[1].questions
        elif reference in self.sweep.suite.runs:
            before = self._questions(reference, evaluation)
        else:
            before = measurements.questions([measurements.evaluation_in(reference, evaluation)], evaluation)
        first = next(iter(self._evaluations(self.run, evaluation).values()))
        lower = is_lower_better(evaluation.metric or first.tasks[evaluation.task]["metric"])
        change = difference(before, self._questions(self.run, evaluation), lower)
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
            curves, reference_curves = measured.reproducible(patterns), reference_seeds[seed].reproducible(patterns)
            if not curves:
                raise NoValue(f"seed {seed} has no metric that matches {' or '.join(patterns)}")
            if alone := sorted(curves.keys() ^ reference_curves.keys()):
                raise NoValue(f"seed {seed}: only one of {self.run} and {reference} has {alone[0]}")
            texts = {name: (_texts(curves[name]), _texts(reference_curves[name])) for name in curves}
            if different := [(step, name) for name, (a, b) in texts.items() for step, _ in a.items() ^ b.items()]:
                step, name = min(different)
                value, other_value = (values.get(step, "missing") for values in texts[name])
                raise NoValue(f"seed {seed}: {name} is {value} at step {step}, and {other_value} in {reference}")
            compared += sum(len(curve.steps) for curve in curves.values())
        return f"{compared} values are bitwise equal to the values of {reference}"


def _texts(curve: Curve) -> dict[int, str]:
    return dict(zip(curve.steps, map(repr, curve.values), strict=True))


def hardware(seeds: Iterable[RunMeasurements]) -> str:
    """Return the hardware that all seeds ran on. Raises GateSkipped if it is unknown, or differs between seeds."""
    kinds = {measured.hardware or "" for measured in seeds}
    if "" in kinds:
        raise GateSkipped("a run did not record its hardware, so its speed cannot be compared")
    if len(kinds) > 1:
        raise GateSkipped(f"the seeds ran on different hardware: {' | '.join(sorted(kinds))}")
    return kinds.pop()
