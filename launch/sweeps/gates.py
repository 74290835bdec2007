"""Judge a run's numbers over its seeds: bounds, bands around a baseline, speeds, equality to the last bit.

A gate fails if it lacks something: a metric that is not there, a NaN, a baseline without the gate. Two things are not judged,
and reported so: a run that did not complete, which has failed the suite already, and a speed on other hardware than the
baseline's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from launch.sweeps import expressions
from launch.sweeps.baseline import Baseline, StoredGate, StoredRun
from launch.sweeps.expressions import Curve, NoValue
from launch.sweeps.measurements import RunMeasurements, mean_and_spread, spread
from launch.sweeps.suite import GateConfig, Suite, gates_of, kind, seeds_of

UPDATE = "update_baseline=true writes it"
REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Limits:
    """The values that pass, ends included; None: no such end."""

    low: float | None = None
    high: float | None = None

    def let_pass(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.low == self.high:
            return f"{self.low:g} exactly"
        ends = (("at least", self.low), ("at most", self.high))
        return " and ".join(f"{name} {end:.4g}" for name, end in ends if end is not None)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one gate."""

    run: str
    gate: str
    outcome: Outcome
    said: str  # what was found, and what was wanted
    values: Mapping[int, float] = field(default_factory=dict)  # by seed
    limits: Limits = Limits()


class GateFailed(ValueError):
    """The gate fails for this reason, without a comparison."""


class GateSkipped(ValueError):
    """The gate cannot be judged, for this reason."""


@dataclass(frozen=True)
class Sweep:
    """Everything that gates are judged from."""

    suite: Suite
    runs: Mapping[str, Mapping[int, RunMeasurements]]  # run -> seed -> what it measured; only those that came to their end
    baseline: Baseline | None

    def seeds(self, run: str) -> dict[int, RunMeasurements]:
        """Return what each seed measured. Raises GateSkipped if one did not complete."""
        asked, there = sorted(seeds_of(self.suite, run)), self.runs.get(run, {})
        if lost := [seed for seed in asked if seed not in there]:
            raise GateSkipped(f"{run} did not come to its end with seed {', '.join(map(str, lost))}")
        return {seed: there[seed] for seed in asked}

    def cases(self, run: str) -> list[GateCase]:
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
    def relative_to(self) -> str | None:
        return self.gate.speed.relative_to if self.gate.speed else None

    @property
    def over(self) -> str:
        """Return how the seeds' values become one; `each`: every seed is judged."""
        return self.gate.over or {"bounds": "each", "band": "mean", "speed": "median"}[kind(self.gate)]

    def verdict(self) -> Verdict:
        values, limits = {}, Limits()
        try:
            if self.gate.same_as is not None:
                return self._verdict(Outcome.PASSED, self._same())
            values = self.values()
            limits, wanted = {"bounds": self._bounds, "band": self._band, "speed": self._speed}[kind(self.gate)]()
        except GateSkipped as reason:
            return self._verdict(Outcome.NOT_JUDGED, str(reason), values, limits)
        except (NoValue, GateFailed) as reason:
            return self._verdict(Outcome.FAILED, str(reason), values, limits)
        judged = values if self.over == "each" else {None: REDUCTIONS[self.over](values.values())}
        bad = {seed: value for seed, value in judged.items() if not limits.let_pass(value)}
        if not bad:
            return self._verdict(Outcome.PASSED, f"{self._shown(judged)}; {wanted}", values, limits)
        since = f"; out of the baseline's curve from step {step} on" if (step := self.departure()) is not None else ""
        return self._verdict(Outcome.FAILED, f"{self._shown(bad)}; {wanted}{since}", values, limits)

    def _verdict(self, outcome: Outcome, said: str, values: Mapping[int, float] = {}, limits: Limits = Limits()) -> Verdict:
        return Verdict(self.run, self.name, outcome, said, values, limits)

    def _shown(self, judged: Mapping[int | None, float]) -> str:
        if None in judged:
            return f"{judged[None]:.4g}, {self.over} of the seeds"
        return ", ".join(f"seed {seed}: {value:.4g}" for seed, value in judged.items())

    # ---- the values -----------------------------------------------------------------------------------------------------

    def values(self) -> dict[int, float]:
        """Return each seed's value, relative to another run's if the gate wants that. Raises NoValue, GateSkipped."""
        values = self._of(self.run)
        if self.relative_to is None:
            return values
        divisors = self._of(self.relative_to)
        if 0 in divisors.values():
            raise NoValue(f"{self.gate.value} of {self.relative_to} is 0")
        return {seed: value / divisors[seed] for seed, value in values.items()}

    def _of(self, run: str) -> dict[int, float]:
        expression, found = expressions.parse(self.gate.value), {}
        for seed, measured in self.sweep.seeds(run).items():
            try:
                found[seed] = expressions.evaluate(expression, measured.curves)
            except NoValue as error:
                raise NoValue(f"{self.gate.value} of {run} has no value with seed {seed}: {error}") from None
        return found

    # ---- what passes ----------------------------------------------------------------------------------------------------

    def _bounds(self) -> tuple[Limits, str]:
        exact = self.gate.equals
        limits = Limits(self.gate.at_least, self.gate.at_most) if exact is None else Limits(exact, exact)
        return limits, f"wanted: {limits}"

    def _band(self) -> tuple[Limits, str]:
        middle, half = self.band()
        better = self.gate.band.better
        limits = Limits(None if better == "lower" else middle - half, None if better == "higher" else middle + half)
        return limits, f"wanted: {limits} (baseline {middle:.4g}, band {half:.3g}{self._beyond(middle, half)})"

    def band(self) -> tuple[float, float]:
        """Return (the baseline's middle, half the band's width). Raises GateFailed."""
        values = self._stored()[1].seeds.values()
        return self._middle(values), self.gate.band.spreads * max(spread(values), self.gate.band.floor)

    def _beyond(self, middle: float, half: float) -> str:
        """Return a hint if the run is better than the whole band."""
        value = self._middle(self.values().values())
        ahead = {"higher": value - middle, "lower": middle - value, "neither": 0.0}[self.gate.band.better]
        return "; better than all of it: is it time for update_baseline=true?" if ahead > half else ""

    def _speed(self) -> tuple[Limits, str]:
        of_run, stored = self._stored()
        if self.relative_to is None:
            now = hardware(self.sweep.seeds(self.run).values())
            if now != of_run.hardware:
                raise GateSkipped(f"other hardware than the baseline's: {now}, and then {of_run.hardware or 'nobody knows'}")
        middle = self._middle(stored.seeds.values())
        if middle <= 0:
            raise GateFailed(f"the baseline is {middle:g}, of which there is no ratio")
        ratios = Limits(self.gate.speed.at_least, self.gate.speed.at_most)
        limits = Limits(*(None if ratio is None else ratio * middle for ratio in (ratios.low, ratios.high)))
        times = self._middle(self.values().values()) / middle
        what = f"the baseline's {middle:.4g}" + (f", both relative to {self.relative_to}" if self.relative_to else "")
        return limits, f"{times:.3g} times {what}; wanted: {ratios} times"

    def departure(self) -> int | None:
        """Return the step from which on the seeds' mean is out of the baseline's curve, for a band over one metric."""
        named = set(expressions.metrics(expressions.parse(self.gate.value)))
        if self.gate.band is None or len(named) != 1:
            return None
        metric, first = named.pop(), None
        before = self._stored()[0].curves.get(metric)
        mean, _ = mean_and_spread([each.curves[metric] for each in self.sweep.seeds(self.run).values()])
        for step, middle, width in reversed([*zip(before.steps, before.mean, before.spread, strict=True)] if before else []):
            half = self.gate.band.spreads * max(width, self.gate.band.floor)
            if step not in mean or abs(mean[step] - middle) <= half:
                break
            first = step
        return first

    # ---- the baseline ---------------------------------------------------------------------------------------------------

    def _stored(self) -> tuple[StoredRun, StoredGate]:
        """Return the baseline's run and gate. Raises GateFailed if this gate cannot be judged by them."""
        if self.sweep.baseline is None:
            raise GateFailed(f"there is no baseline yet; {UPDATE}")
        of_run = self.sweep.baseline.of(self.run)
        stored = of_run.gates.get(self.name)
        if stored is None or not stored.seeds:
            raise GateFailed(f"the baseline does not have this gate; {UPDATE}")
        if stored.value != self.gate.value:
            raise GateFailed(f"the baseline is of {stored.value}, and the gate of {self.gate.value}; {UPDATE}")
        if stored.relative_to != self.relative_to:
            before, now = (f"relative to {run}" if run else "absolute" for run in (stored.relative_to, self.relative_to))
            raise GateFailed(f"the baseline is {before}, and the gate {now}; {UPDATE}")
        return of_run, stored

    def _middle(self, values: Iterable[float]) -> float:
        """Return the seeds' values as one. Where `each` is judged, it is their mean."""
        return REDUCTIONS["mean" if self.over == "each" else self.over](values)

    def to_store(self) -> StoredGate:
        """Return what a baseline keeps. Raises NoValue, GateSkipped."""
        return StoredGate(self.gate.value, self.relative_to, {str(seed): value for seed, value in self.values().items()})

    # ---- to the last bit ------------------------------------------------------------------------------------------------

    def _same(self) -> str:
        """Raises GateFailed at the first metric that differs."""
        other, compared = self.gate.same_as.run, 0
        others = self.sweep.seeds(other)
        for seed, measured in self.sweep.seeds(self.run).items():
            patterns = self.gate.same_as.metrics
            mine, theirs = measured.reproducible(patterns), others[seed].reproducible(patterns)
            if not mine:
                raise GateFailed(f"seed {seed} has no metric like {' or '.join(patterns)}")
            if alone := sorted(mine.keys() ^ theirs.keys()):
                raise GateFailed(f"seed {seed}: {alone[0]} is in one of {self.run} and {other} only")
            texts = {name: (_texts(mine[name]), _texts(theirs[name])) for name in mine}
            if different := [(step, name) for name, (one, two) in texts.items() for step, _ in one.items() ^ two.items()]:
                step, name = min(different)
                one, two = (values.get(step, "not there") for values in texts[name])
                raise GateFailed(f"seed {seed}: {name} is {one} at step {step}, and {two} in {other}")
            compared += sum(len(curve.steps) for curve in mine.values())
        return f"{compared} values are the same as in {other}, to the last bit"


def _texts(curve: Curve) -> dict[int, str]:
    return dict(zip(curve.steps, map(repr, curve.values), strict=True))


def hardware(seeds: Iterable[RunMeasurements]) -> str:
    """Return the kind that all seeds ran on. Raises GateSkipped where they do not say, or ran on different kinds."""
    kinds = {each.hardware for each in seeds}
    if None in kinds:
        raise GateSkipped("not every run says which hardware it ran on, and a speed is of one kind")
    if len(kinds) > 1:
        raise GateSkipped(f"the seeds ran on different hardware: {' | '.join(sorted(kinds))}")
    return kinds.pop()
