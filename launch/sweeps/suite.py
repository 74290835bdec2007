"""What the YAML of a sweep says: its schema, how it is read, and all that is wrong with it, in one list.

    python launch/sweep.py sweep=NAME [key=value ...]      NAME: a file in recipes/sweeps/, without .yaml, or a path to one

A `key=value` whose first part is a key of the schema below changes the suite; any other one goes to every run as an override of
its recipe. Like recipes, suites have parents (`defaults: other.yaml`), and a key that does not exist is told with the nearest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.run_folder import flat
from launch.sweeps import expressions
from pipeline.config import RECIPES, Problem, Recipe, as_problem, independent, layers, refuse, typed
from pipeline.config.values import Float, Int, Text

SUITES = RECIPES / "sweeps"
OVER = ("each", "mean", "median", "min", "max")
BETTER = ("higher", "lower", "neither")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
GIVEN = ("run_dir", "name")  # keys of a recipe that the sweep sets itself


# ---- the schema -----------------------------------------------------------------------------------------------------------


@dataclass
class BandConfig:
    """Within the baseline's mean over seeds +- spreads * spread, where spread is its standard deviation, `floor` at least."""

    spreads: Float = 3.0
    floor: Float = 0.0  # in units of the value: what a spread of three seeds that happen to agree is taken for
    better: Text = "neither"  # higher, lower: only the other side of the band can fail; neither: both


@dataclass
class SpeedConfig:
    """A ratio to the baseline: of the value itself, which is only judged on the baseline's hardware; or, with `relative_to`, of
    the value divided by that of another run of this sweep, seed by seed, which is judged anywhere."""

    at_most: Float | None = None  # of times: e.g. 1.25
    at_least: Float | None = None  # of throughputs: e.g. 0.8
    relative_to: Text | None = None  # a run of this sweep


@dataclass
class SameConfig:
    """Every reproducible metric is that of another run to the last bit, seed by seed."""

    run: Text = typed.MISSING
    metrics: list[Text] = field(default_factory=lambda: ["*"])  # patterns of names, for runs that differ in some on purpose


@dataclass
class GateConfig:
    """One check: bounds (at_least, at_most, equals), a band, a speed, or same_as."""

    value: Text | None = None  # an expression, launch/sweeps/expressions.py
    over: Text | None = None  # what becomes of the seeds' values; null: each for bounds, mean for a band, median for a speed
    at_least: Float | None = None
    at_most: Float | None = None
    equals: Float | None = None  # exactly
    band: BandConfig | None = None
    speed: SpeedConfig | None = None
    same_as: SameConfig | None = None
    runs: list[Text] | None = None  # of a suite's gate: which runs it is for; null: all


@dataclass
class RunConfig:
    recipe: Text | None = None  # null: of the run's name
    seeds: list[Int] | None = None  # null: the suite's
    overrides: dict[str, Any] = field(default_factory=dict)  # keys of the recipe, as a mapping or dotted
    gates: dict[str, GateConfig] = field(default_factory=dict)


@dataclass
class CheckConfig:
    """The job that judges at the end: one task that reads the run folders. Null: as cluster.train of the first run."""

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    mem: Text | None = None
    time_min: Int = 30


@dataclass
class Suite:
    name: Text = typed.MISSING  # the file's, without .yaml
    seeds: list[Int] = field(default_factory=lambda: [1, 2, 3])
    max_concurrent: Int = 4  # runs at once
    retries: Int = 1  # of a run that failed
    overrides: dict[str, Any] = field(default_factory=dict)  # of every run
    runs: dict[str, RunConfig] = field(default_factory=dict)
    gates: dict[str, GateConfig] = field(default_factory=dict)
    baseline: Text | None = None  # beside the suite's file; null: baselines/<name>.yaml
    folder: Text = "runs/sweeps"  # this one is in <folder>/<name>/<id>
    check: CheckConfig = field(default_factory=CheckConfig)


def seeds_of(suite: Suite, run: str) -> list[int]:
    own = suite.runs[run].seeds
    return suite.seeds if own is None else own


def gates_of(suite: Suite, run: str) -> dict[str, GateConfig]:
    """The suite's, then the run's own, which replace those of the same name."""
    shared = {name: gate for name, gate in suite.gates.items() if gate.runs is None or run in gate.runs}
    return {**shared, **suite.runs[run].gates}


def kind(gate: GateConfig) -> str:
    """bounds, band, speed, same_as; of a gate that is several or none: all of them in a row."""
    bounds = [gate.at_least, gate.at_most, gate.equals]
    kinds = {"bounds": any(bound is not None for bound in bounds), "band": gate.band, "speed": gate.speed}
    return " and ".join(name for name, there in {**kinds, "same_as": gate.same_as}.items() if there)


# ---- reading it -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A suite as the command line wants it."""

    suite: Suite
    baseline: Path  # absolute
    overrides: list[str]  # of every run's recipe, from the command line


def find(name: str) -> Path:
    """The file of a suite. Raises RecipeError with the suites that exist."""
    return layers.named(name, SUITES, f"sweep={name}: no such sweep")


def load(name: str, arguments: Iterable[str] = ()) -> Asked:
    """Raises RecipeError with all that is wrong with it; of the recipes' own keys nothing is known here."""
    path = find(name)
    tree = layers.merged(layers.Branch({"name": layers.Leaf(path.stem)}), layers.chain(path))
    given, overrides, found = _split(list(arguments))
    for key, node in given:
        layer = layers.Branch()
        layer.set(key, node)
        tree = layers.merged(tree, layer)
    wrong = list(typed.unknown(Suite, tree, Suite))
    for problem in wrong:
        tree.drop(problem.key)
    suite, faults = _built(tree)
    for problem in faults:
        tree.drop(problem.key)  # its default stands in, so that the rest can be judged
    wrong += faults
    wrong += independent(problems(suite or _built(tree)[0]), [problem.key for problem in wrong])
    refuse([*map(as_problem, found), *wrong])
    return Asked(suite, (path.parent / (suite.baseline or f"baselines/{suite.name}.yaml")).absolute(), overrides)


def read(path: Path) -> Suite:
    """One that `to_yaml` wrote. Raises RecipeError."""
    suite, faults = _built(layers.chain(path))
    refuse(problem.within(str(path)) for problem in faults)
    return suite


def to_yaml(suite: Suite) -> str:
    return layers.dumped(asdict(suite))


def _built(tree: layers.Branch) -> tuple[Suite | None, list[Problem]]:
    """Return the suite, None if values keep it from being made, and what is wrong with them."""
    return typed.validated(Suite, typed.filled(Suite, tree))


def _split(arguments: list[str]) -> tuple[list[tuple[str, Any]], list[str], list[str]]:
    """(what changes the suite, what goes to the recipes, what is neither)."""
    suites, recipes = typed.fields(Suite), typed.fields(Recipe)
    given, overrides, found = [], [], []
    for argument in arguments:
        top = argument.partition("=")[0].partition(".")[0]
        if top in GIVEN:
            found.append(f"'{top}' on the command line: the sweep gives each run its own")
        elif top in suites:
            given += layers.overrides([argument])
        elif top in recipes or "=" not in argument:
            list(layers.overrides([argument]))  # raises for what is not key=value
            overrides.append(argument)
        else:
            near = difflib.get_close_matches(top, [*suites, *recipes], 1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; a sweep has: {', '.join(suites)}"
            found.append(f"'{top}' on the command line is a key neither of a sweep nor of a recipe{hint}")
    return given, overrides, found


def as_arguments(overrides: dict[str, Any]) -> list[str]:
    """Return a mapping of a recipe's keys as `key=value`."""
    values = flat(overrides) if overrides else {}
    return [f"{key}={layers.dumped([value], on_one_line=True).strip()[1:-1]}" for key, value in values.items()]


# ---- what can be said against it -------------------------------------------------------------------------------------------


def problems(suite: Suite) -> Iterator[str]:
    """Of what is there and of the right type."""
    if not NAME.fullmatch(suite.name):
        yield f"name: '{suite.name}' must be letters, digits, '.', '_' and '-'"
    if not suite.runs:
        yield "runs: there are none; a sweep needs one at least, e.g. runs: {tiny_sft: {}}"
    for key, least in {"max_concurrent": 1, "retries": 0, "check.time_min": 1}.items():
        value = suite.check.time_min if key.startswith("check") else getattr(suite, key)
        if value < least:
            yield f"{key}: {value}, but it must be {least} at least"
    yield from _seeds("seeds", suite.seeds)
    yield from _given("overrides", suite.overrides)
    for name, gate in suite.gates.items():
        yield from _gate(suite, f"gates.{name}", gate)
        for run in gate.runs or ():
            yield from _is_run(suite, f"gates.{name}.runs", run)
    for name, run in suite.runs.items():
        if not NAME.fullmatch(name):
            yield f"runs.{name}: a run's name must be letters, digits, '.', '_' and '-'; it is the name of a folder"
        if run.seeds is not None:
            yield from _seeds(f"runs.{name}.seeds", run.seeds)
        yield from _given(f"runs.{name}.overrides", run.overrides)
        for gate_name, gate in run.gates.items():
            yield from _gate(suite, f"runs.{name}.gates.{gate_name}", gate)
            if gate.runs is not None:
                yield f"runs.{name}.gates.{gate_name}.runs: a gate of a run is for that run; put it into `gates` for several"
        if not gates_of(suite, name):
            yield f"runs.{name}: no gate is for it, so nothing that it measures could fail; give it one, in `gates` or its own"
        for gate_name, gate in gates_of(suite, name).items():
            yield from _other_run(suite, name, gate_name, gate)
            if gate.band and gate.band.floor == 0 and len(seeds_of(suite, name)) < 2:
                yield f"gate '{gate_name}' of run '{name}': one seed has no spread, so its band is a point; give band.floor"


def bad_name(key: str, name: str) -> Problem:
    return Problem(key, "bad-name", f"got '{name}'; expected letters, digits, '.', '_' and '-': it is the name of a folder")


def _seeds(key: str, seeds: list[int]) -> Iterator[str]:
    if not seeds:
        yield f"{key}: there are none; one at least"
    if doubles := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        yield f"{key}: {doubles[0]} comes twice; each seed is one run"
    if any(seed < 0 for seed in seeds):
        yield f"{key}: {min(seeds)}, but a seed is 0 at least"


def _given(key: str, overrides: dict[str, Any]) -> Iterator[str]:
    for override in as_arguments(overrides):
        name = override.partition("=")[0]
        if name in GIVEN:
            yield f"{key}.{name}: the sweep gives each run its own"
        if re.fullmatch(r"\w+\.seed", name):
            yield f"{key}.{name}: a run's seeds are listed in `seeds`"


def _is_run(suite: Suite, key: str, run: str) -> Iterator[str]:
    if run not in suite.runs:
        near = difflib.get_close_matches(run, suite.runs, 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        yield f"{key}: '{run}' is no run of this sweep; {hint}there are: {', '.join(suite.runs)}"


def _gate(suite: Suite, key: str, gate: GateConfig) -> Iterator[str]:
    kinds = kind(gate)
    if not kinds:
        yield f"{key}: says nothing that could fail; give at_least, at_most, equals, band, speed or same_as"
    elif " and " in kinds:
        yield f"{key}: is {kinds}; a gate is one of them, so make it several"
    if gate.equals is not None and (gate.at_least is not None or gate.at_most is not None):
        yield f"{key}: equals leaves nothing for at_least and at_most to say"
    if None not in (gate.at_least, gate.at_most) and gate.at_least > gate.at_most:
        yield f"{key}: at_least {gate.at_least:g} is above at_most {gate.at_most:g}: nothing passes"
    if gate.over is not None and gate.over not in OVER:
        yield f"{key}.over: '{gate.over}' is none of {', '.join(OVER)}"
    if gate.same_as is not None:
        unused = [name for name in ("value", "over") if getattr(gate, name) is not None]
        yield from (f"{key}.{name}: same_as compares every metric of every seed, so it means nothing" for name in unused)
    else:
        yield from _value(key, gate)
    if gate.band:
        yield from _band(f"{key}.band", gate.band)
    if gate.speed:
        yield from _speed(f"{key}.speed", gate.speed)


def _value(key: str, gate: GateConfig) -> Iterator[str]:
    if gate.value is None:
        yield f"{key}.value: is missing: an expression over metrics, such as last(val/loss)"
        return
    try:
        expression = expressions.parse(gate.value)
    except expressions.Malformed as error:
        yield f"{key}.value: {error}"
        return
    if not any(expressions.metrics(expression)):
        yield f"{key}.value: '{gate.value}' names no metric, so it is the same whatever happens"


def _band(key: str, band: BandConfig) -> Iterator[str]:
    if band.better not in BETTER:
        yield f"{key}.better: '{band.better}' is none of {', '.join(BETTER)}"
    for name in ("spreads", "floor"):
        if getattr(band, name) < 0:
            yield f"{key}.{name}: {getattr(band, name):g}, but it must be 0 at least"


def _speed(key: str, speed: SpeedConfig) -> Iterator[str]:
    if speed.at_most is None and speed.at_least is None:
        yield f"{key}: says nothing that could fail; give at_most (of a time) or at_least (of a throughput)"
    for name, is_sound in {"at_most": lambda ratio: ratio >= 1, "at_least": lambda ratio: 0 < ratio <= 1}.items():
        ratio = getattr(speed, name)
        if ratio is not None and not is_sound(ratio):
            right = "1 at least, or the baseline itself fails" if name == "at_most" else "above 0 and 1 at most"
            yield f"{key}.{name}: {ratio:g}, but a ratio to the baseline must be {right}"


def _other_run(suite: Suite, run: str, name: str, gate: GateConfig) -> Iterator[str]:
    """Gates that look at a second run: it must be there, be another, and have seeds in common."""
    for field_name, other in (
        ("same_as.run", gate.same_as and gate.same_as.run),
        ("speed.relative_to", gate.speed and gate.speed.relative_to),
    ):
        if other is None:
            continue
        where = f"gate '{name}' of run '{run}': {field_name}"
        if other == run:
            yield f"{where}: is the run itself; name another"
        elif other not in suite.runs:
            yield from _is_run(suite, where, other)
        elif lacking := sorted(set(seeds_of(suite, run)) - set(seeds_of(suite, other))):
            yield f"{where}: '{other}' has no seed {', '.join(map(str, lacking))}, and they are compared seed by seed"
