"""Define, read and check the YAML of a sweep.

    python launch/sweep.py sweep=NAME [key=value ...]      NAME: a file in recipes/sweeps/, without .yaml, or a path to one

A `key=value` whose first part is a key of the schema below changes the suite; any other one overrides the recipe of every run.
Suites have parents like recipes (`defaults: other.yaml`). The problem of an unknown key suggests the nearest one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from launch.runs import suites as evaluation_suites
from launch.runs.evaluation_comparison import is_lower_better
from launch.sweeps.expressions import fault
from launch.sweeps.search_space import ParameterConfig, SearchConfig, Values, is_whole
from pipeline.config import (
    RECIPES,
    Problem,
    Recipe,
    RecipeError,
    config_tree,
    formatting,
    independent,
    loading,
    refuse,
    schema_validation,
    yaml_text,
)
from pipeline.config.config_tree import COMMAND_LINE
from pipeline.recipe.values import MISSING, Check, Float, NotNegative, Positive, Text, leaves

SUITES = RECIPES / "sweeps"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
BASELINE = "baseline"
SET_BY_SWEEP = ("run_dir", "name")  # keys of each recipe that the sweep sets
READ_BY_SEARCH = ("name", "overrides", "folder", "search", "retries")
MOST_POINTS = 10_000
"""Maximum number of points of a grid."""


# ---- the schema of runs and gates ---------------------------------------------------------------------------------------


def _doubles(seeds: list[int]) -> str | None:
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    return f"got {twice[0]} twice; expected distinct seeds" if twice else None


Seeds = Annotated[
    list[NotNegative],
    Check(lambda seeds: None if seeds else "got none; expected at least one", "missing-value"),
    Check(_doubles, "given-twice"),
]


@dataclass
class BandConfig:
    """A band around the baseline's mean over the seeds. Half its width is spreads * max(standard deviation, floor)."""

    spreads: Annotated[Float, Field(ge=0)] = 3.0
    floor: Annotated[Float, Field(ge=0)] = 0.0  # in units of the value, for seeds that agree by chance
    better: Literal["higher", "lower", "neither"] = "neither"  # with higher or lower, only worse values fail


@dataclass
class SpeedConfig:
    """Bounds on the value divided by the baseline's value. Evaluated only on the baseline's hardware.

    With `relative_to`, the value is first divided, for each seed, by the value of another run of this sweep. Then any hardware
    counts.
    """

    at_most: Annotated[Float | None, Field(ge=1)] = None  # for times, such as 1.25
    at_least: Annotated[Float | None, Field(gt=0, le=1)] = None  # for throughputs, such as 0.8
    relative_to: Text | None = None  # a run of this sweep


@dataclass
class SameConfig:
    """Demands that every reproducible metric equals that of another run with the same seed, to the last bit.

    Equal runs on GPUs have equal metrics only with policy.deterministic=true.
    """

    run: Text = MISSING
    metrics: list[Text] = field(default_factory=lambda: ["*"])  # patterns of the names to compare


@dataclass
class EvaluationGateConfig:
    """The score of a task that a gate reads, in place of `value`, from an evaluation of each seed's checkpoint.

    With `not_worse_than` the gate is a paired comparison over the questions. The answers of all seeds count as samples of a
    question.
    """

    suite: Text = MISSING  # as of launch/evaluate.py
    task: Text = MISSING
    metric: Text | None = None  # null: the task's own
    step: NotNegative | None = None  # of the checkpoint; null: the run's last one
    not_worse_than: Text | None = None  # `baseline`, a run of this sweep, or the folder of an evaluation, with a slash
    margin: Annotated[Float | None, Field(ge=0)] = None  # null: `worse` fails; else an allowed loss, which must be shown


@dataclass
class GateConfig:
    """One check: bounds (at_least, at_most, equals), a band, a speed, same_as, or a paired comparison of an evaluation."""

    value: Annotated[Text, Check(fault)] | None = None  # an expression, launch/sweeps/expressions.py
    over: Literal["each", "mean", "median", "min", "max"] | None = None  # of the seeds' values; null: see `GateCase.over`
    at_least: Float | None = None
    at_most: Float | None = None
    equals: Float | None = None  # exactly
    band: BandConfig | None = None
    speed: SpeedConfig | None = None
    same_as: SameConfig | None = None
    evaluation: EvaluationGateConfig | None = None  # a score, in place of `value`
    runs: list[Text] | None = None  # runs that a suite's gate applies to; null: all

    @property
    def kind(self) -> str:
        """The kind: bounds, band, speed, same_as or paired. "" if it has none; several are joined by `and`."""
        bounds = any(bound is not None for bound in (self.at_least, self.at_most, self.equals))
        paired = self.evaluation and self.evaluation.not_worse_than
        kinds = {"bounds": bounds, "band": self.band, "speed": self.speed, "same_as": self.same_as, "paired": paired}
        return " and ".join(name for name, is_set in kinds.items() if is_set)

    @property
    def needs_baseline(self) -> bool:
        """True if the gate compares with the baseline."""
        return self.kind in ("band", "speed") or (self.evaluation is not None and self.evaluation.not_worse_than == BASELINE)


@dataclass
class RunConfig:
    """One run of the suite: a recipe, its seeds, overrides and gates."""

    recipe: Text | None = None  # null: the run's name
    seeds: Seeds | None = None  # null: the suite's
    overrides: dict[str, Any] = field(default_factory=dict)  # keys of the recipe, as a mapping or dotted
    gates: dict[str, GateConfig] = field(default_factory=dict)


@dataclass
class CheckConfig:
    """The Slurm job that checks the gates at the end, with one task. null: the value of cluster.train of the first run."""

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    mem: Text | None = None
    time_min: Positive = 30


# ---- the whole schema ---------------------------------------------------------------------------------------------------


@dataclass
class Suite:
    """A suite of runs and gates, or of a search."""

    name: Text = MISSING  # the file's, without .yaml
    seeds: Seeds = field(default_factory=lambda: [1, 2, 3])
    max_concurrent: Positive = 4  # runs at once
    retries: NotNegative = 1  # of a run that failed
    overrides: dict[str, Any] = field(default_factory=dict)  # of every run
    runs: dict[str, RunConfig] = field(default_factory=dict)
    gates: dict[str, GateConfig] = field(default_factory=dict)
    baseline: Text | None = None  # beside the suite's file; null: baselines/<name>.yaml
    folder: Text = "runs/sweeps"  # the sweep is in <folder>/<name>/<id>
    search: SearchConfig | None = None  # in place of runs
    check: CheckConfig = field(default_factory=CheckConfig)

    def seeds_of(self, run: str) -> list[int]:
        """Return the seeds of a run: the run's own, else the suite's."""
        seeds = self.runs[run].seeds
        return self.seeds if seeds is None else seeds

    def gates_of(self, run: str) -> dict[str, GateConfig]:
        """Return name -> gate of a run: the suite's gates, updated with the run's own."""
        shared = {name: gate for name, gate in self.gates.items() if gate.runs is None or run in gate.runs}
        return {**shared, **self.runs[run].gates}

    def overrides_of(self, section: RunConfig | SearchConfig, command_line: list[str]) -> list[str]:
        """Return the overrides of a run, or of every trial: the suite's, the section's, the command line's."""
        return [*as_arguments(self.overrides), *as_arguments(section.overrides), *command_line]


def as_arguments(values: Values) -> list[str]:
    """Return values of a recipe's keys, which may be nested, as `key=value` arguments."""
    return [f"{key}={formatting.on_one_line(value)}" for key, value in leaves(values)]


# ---- reading ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedSuite:
    """Holds a suite and the overrides of the command line."""

    suite: Suite
    baseline: Path  # absolute
    overrides: list[str]  # of every run's recipe, from the command line

    def folder(self, sweep_id: str) -> Path:
        """Return the folder of the sweep with this id."""
        return (Path(self.suite.folder) / self.suite.name / sweep_id).absolute()


def load(name: str, arguments: Iterable[str] = ()) -> LoadedSuite:
    """Return a suite after all checks of its own keys.

    Raises RecipeError with all its problems, or with the suites that exist. Keys of recipes are not checked.
    """
    path = config_tree.find_file(name, SUITES, "sweep")
    tree = config_tree.merge(
        config_tree.ConfigMapping({"name": config_tree.ConfigValue(path.stem)}), config_tree.load_with_parents(path)
    )
    changes, overrides, argument_problems = _split(arguments)
    tree = config_tree.merge(tree, loading.layer(changes))
    wrong = list(schema_validation.unknown_keys(Suite, tree))
    for problem in wrong:
        tree.drop(problem.key)
    suite, faults = _build(tree)
    for problem in faults:
        tree.drop(problem.key)  # use the default, to check the rest
    wrong += faults
    suite = suite or _build(tree)[0]
    assert suite is not None, "without the faulty keys it can be built"
    wrong += independent(problems(suite), [problem.key for problem in wrong])
    refuse([*argument_problems, *wrong])
    return LoadedSuite(suite, (path.parent / (suite.baseline or f"baselines/{suite.name}.yaml")).absolute(), overrides)


def read(path: Path) -> Suite:
    """Read a suite that `to_yaml` wrote. Raises RecipeError."""
    suite, faults = _build(config_tree.load_with_parents(path))
    refuse(problem.within(str(path)) for problem in faults)
    assert suite is not None, "a suite without faults is built"
    return suite


def to_yaml(suite: Suite) -> str:
    """Return the suite as YAML, which `read` reads back."""
    return yaml_text.dump(asdict(suite))


def _build(tree: config_tree.ConfigMapping) -> tuple[Suite | None, list[Problem]]:
    """Return (the suite, or None if its values prevent one; the problems of its values)."""
    return schema_validation.validate_tree(Suite, schema_validation.with_defaults(Suite, tree))


def _split(arguments: Iterable[str]) -> tuple[list[tuple[str, Any]], list[str], list[Problem]]:
    """Split arguments into (changes of the suite, overrides of the recipes, problems of other arguments)."""
    suites = schema_validation.fields(Suite)
    recipes = schema_validation.fields(Recipe)  # pyright: ignore[reportArgumentType]  # a class is hashable, whatever its instances are
    changes, overrides, problems = [], [], []
    for argument in arguments:
        top = argument.partition("=")[0].partition(".")[0]
        if top in SET_BY_SWEEP:
            problems.append(Problem(top, "contradiction", "the sweep sets this for each run", COMMAND_LINE))
        elif top in suites:
            changes += config_tree.parse_overrides([argument])
        elif top in recipes or "=" not in argument:
            list(config_tree.parse_overrides([argument]))  # raises for what is not key=value
            overrides.append(argument)
        else:
            hint = _nearest(top, [*suites, *recipes]) or f"the keys of a sweep are {', '.join(suites)}"
            problems.append(Problem(top, "unknown-key", f"is not a key of a sweep or a recipe; {hint}", COMMAND_LINE))
    return changes, overrides, problems


# ---- checks of runs and gates -------------------------------------------------------------------------------------------


def problems(suite: Suite) -> Iterator[Problem]:
    """Yield the problems of the values of a suite that fits the schema."""
    if not NAME.fullmatch(suite.name):
        yield bad_name("name", suite.name)
    if suite.search is not None:
        yield from _search_problems(suite, suite.search)
        return
    if not suite.runs:
        yield Problem("runs", "missing-value", "got none; expected at least one, such as runs: {tiny_sft: {}}")
    yield from _override_problems("overrides", suite.overrides)
    for name, gate in suite.gates.items():
        yield from _gate(f"gates.{name}", gate)
        for run in gate.runs or ():
            yield from _is_run(suite, f"gates.{name}.runs", run)
    for name, run in suite.runs.items():
        key = f"runs.{name}"
        if not NAME.fullmatch(name):
            yield bad_name(key, name)
        yield from _override_problems(f"{key}.overrides", run.overrides)
        for gate_name, gate in run.gates.items():
            yield from _gate(f"{key}.gates.{gate_name}", gate)
            if gate.runs is not None:
                several = "a gate of a run applies only to that run. Try `gates` for several runs"
                yield Problem(f"{key}.gates.{gate_name}.runs", "has-no-effect", several)
        if not suite.gates_of(name):
            yield Problem(f"{key}.gates", "missing-value", "the run has no gate. Try a gate here or in `gates`")
        for gate_name, gate in suite.gates_of(name).items():
            yield from _of_run(suite, name, f"{f'{key}.' if gate_name in run.gates else ''}gates.{gate_name}", gate)


def bad_name(key: str, name: str) -> Problem:
    """Return the problem of a name that no folder can have."""
    return Problem(key, "bad-format", f"got '{name}'; expected letters, digits, '.', '_' and '-', since it names a folder")


def _override_problems(key: str, overrides: Values) -> Iterator[Problem]:
    for name, _ in leaves(overrides):
        if name in SET_BY_SWEEP:
            yield Problem(f"{key}.{name}", "contradiction", "the sweep sets this for each run")
        if re.fullmatch(r"\w+\.seed", name):
            yield Problem(f"{key}.{name}", "contradiction", "expected no seed in overrides. Try the key `seeds`")


def _is_run(suite: Suite, key: str, run: str) -> Iterator[Problem]:
    if run not in suite.runs:
        near = _nearest(run, suite.runs)
        yield Problem(key, "not-a-choice", f"got '{run}'; expected one of {', '.join(suite.runs)}{near and f'; {near}'}")


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [*names], 1)
    return f"did you mean '{near[0]}'?" if near else ""


def _gate(key: str, gate: GateConfig) -> Iterator[Problem]:
    kinds, bounds = gate.kind, (gate.at_least, gate.at_most)
    if not kinds:
        nothing = "got no condition; expected at_least, at_most, equals, band, speed, same_as or not_worse_than"
        yield Problem(key, "missing-value", nothing)
    elif " and " in kinds:
        yield Problem(key, "contradiction", f"got {kinds}; expected one of them per gate")
    if gate.equals is not None and bounds != (None, None):
        yield Problem(f"{key}.equals", "contradiction", "got at_least or at_most too; expected equals alone, or only bounds")
    if gate.at_least is not None and gate.at_most is not None and gate.at_least > gate.at_most:
        message = f"got {gate.at_least:g}, which is above at_most; expected at most {gate.at_most:g}"
        yield Problem(f"{key}.at_least", "contradiction", message)
    if gate.speed and gate.speed.at_most is None and gate.speed.at_least is None:
        message = "got no bound; expected at_most (for a time) or at_least (for a throughput)"
        yield Problem(f"{key}.speed", "missing-value", message)
    if gate.same_as is not None:
        message = "same_as compares all metrics of all seeds, and does not read this key"
        for name in ("value", "over"):
            if getattr(gate, name) is not None:
                yield Problem(f"{key}.{name}", "has-no-effect", message)
        if gate.evaluation:
            yield Problem(f"{key}.evaluation", "contradiction", "got same_as too; expected one of them")
    elif gate.evaluation is not None:
        yield from _evaluation(key, gate, gate.evaluation)
    elif gate.value is None:
        yield Problem(f"{key}.value", "missing-value", "expected an expression over metrics, such as last(val/loss)")


def _evaluation(key: str, gate: GateConfig, evaluation: EvaluationGateConfig) -> Iterator[Problem]:
    """Yield the problems of a gate that reads the score of an evaluation."""
    for name in ("value", "speed"):
        if getattr(gate, name) is not None:
            yield Problem(f"{key}.{name}", "contradiction", f"got {name} and evaluation; expected one of the two")
    if evaluation.not_worse_than is None:
        if evaluation.margin is not None:
            yield Problem(f"{key}.evaluation.margin", "has-no-effect", "only a gate with not_worse_than reads this key")
    elif gate.over is not None:
        yield Problem(f"{key}.over", "has-no-effect", "not_worse_than compares all seeds together, and does not read this key")
    try:
        tasks = evaluation_suites.task_names(evaluation.suite)
    except RecipeError as error:
        yield from (replace(problem, key=f"{key}.evaluation.suite") for problem in error.problems)
        return
    if tasks and evaluation.task not in (*tasks, MISSING):
        near = _nearest(evaluation.task, tasks)
        message = f"got '{evaluation.task}'; expected a task of {evaluation.suite}: {', '.join(tasks)}{near and f'; {near}'}"
        yield Problem(f"{key}.evaluation.task", "not-a-choice", message)
    metric = evaluation.metric or evaluation_suites.task_metric(evaluation.suite, evaluation.task)
    if evaluation.not_worse_than is not None and metric and is_lower_better(metric) is None:
        message = f"{metric} has a neutral value, and neither a lower nor a higher one is better. Try at_least and at_most"
        yield Problem(f"{key}.evaluation.not_worse_than", "unsupported", message)


def _of_run(suite: Suite, run: str, key: str, gate: GateConfig) -> Iterator[Problem]:
    """Yield the problems of a gate with one of its runs, such as those of the other run that the gate compares with."""
    seeds = {*suite.seeds_of(run)}
    if gate.band and gate.band.floor == 0 and len(seeds) < 2:
        point = f"got 0 with one seed of run '{run}'; expected above 0, since one seed has no standard deviation"
        yield Problem(f"{key}.band.floor", "missing-value", point)
    references = {"same_as.run": gate.same_as and gate.same_as.run, "speed.relative_to": gate.speed and gate.speed.relative_to}
    reference = gate.evaluation.not_worse_than if gate.evaluation else None
    if reference != BASELINE and "/" not in (reference or "/"):
        references["evaluation.not_worse_than"] = reference
    for name, target in references.items():
        if target == run:
            yield Problem(f"{key}.{name}", "contradiction", f"got '{run}', the run itself; expected another run")
        elif target is not None and target not in suite.runs:
            yield from _is_run(suite, f"{key}.{name}", target)
        elif target is not None and name != "evaluation.not_worse_than" and (lacking := seeds - {*suite.seeds_of(target)}):
            missing = ", ".join(map(str, sorted(lacking)))
            yield Problem(f"{key}.{name}", "contradiction", f"'{target}' has no seed {missing}; expected every seed of '{run}'")


# ---- checks of a search -------------------------------------------------------------------------------------------------


def _search_problems(suite: Suite, search: SearchConfig) -> Iterator[Problem]:
    """Yield the problems of a suite with a search, such as keys that are not read or set twice. Recipes are not read."""
    default = asdict(Suite())
    for key, value in asdict(suite).items():
        if key not in READ_BY_SEARCH and value != default[key]:
            yield Problem(key, "contradiction", f"a suite with search does not read this key. Try a suite without {key}")
    keys = [("search.parameters", name) for name in search.parameters]
    keys += [("overrides", name) for name, _ in leaves(suite.overrides)]
    keys += [("search.overrides", name) for name, _ in leaves(search.overrides)]
    for key, name in keys:
        if name in SET_BY_SWEEP:
            yield Problem(f"{key}.{name}", "contradiction", "the sweep sets this for each trial")
        elif name in search.parameters and key != "search.parameters":
            yield Problem(f"{key}.{name}", "has-no-effect", "search.parameters sets this key for every trial")
    if not search.parameters:
        example = "such as policy.optimizer.kwargs.lr: {low: 1.0e-6, high: 1.0e-4, log: true}"
        yield Problem("search.parameters", "missing-value", f"got none; expected at least one, {example}")
    faults = [fault for key, parameter in search.parameters.items() for fault in _parameter(search, key, parameter)]
    yield from faults
    reads = {"none": (), "median": ("min_steps",)}.get(search.pruner, ("min_steps", "reduction_factor"))
    for name in ("min_steps", "reduction_factor"):
        if name not in reads and getattr(search, name) != getattr(SearchConfig, name):
            yield Problem(f"search.{name}", "has-no-effect", f"pruner={search.pruner} does not read it")
    if search.parameters and not faults:
        yield from _sampler(search)


def _parameter(search: SearchConfig, key: str, parameter: ParameterConfig) -> Iterator[Problem]:
    path = f"search.parameters.{key}"
    for inner in search.parameters:
        if inner.startswith(f"{key}."):
            yield Problem(path, "contradiction", f"got {inner} too, which is part of this key; expected one of them")
    yield from _range(path, key, parameter) if parameter.choices is None else _choices(path, parameter, parameter.choices)


def _choices(path: str, parameter: ParameterConfig, choices: list[Any]) -> Iterator[Problem]:
    if not choices:
        yield Problem(f"{path}.choices", "missing-value", "got none; expected at least one")
    for choice in choices:
        if not isinstance(choice, str | int | float | None) or (isinstance(choice, float) and not math.isfinite(choice)):
            yield Problem(f"{path}.choices", "wrong-type", f"got {choice}; expected texts, numbers, true, false or null")
            return
    if doubles := [item for i, item in enumerate(choices) if item in choices[:i]]:
        yield Problem(f"{path}.choices", "given-twice", f"got {doubles[0]} twice; expected distinct choices")
    for name in ("low", "high", "step"):
        if getattr(parameter, name) is not None:
            yield Problem(f"{path}.{name}", "contradiction", "got choices too; expected a range or choices")
    if parameter.log:
        message = "only a range is drawn on a logarithmic scale; this parameter has choices"
        yield Problem(f"{path}.log", "has-no-effect", message)


def _range(path: str, key: str, parameter: ParameterConfig) -> Iterator[Problem]:
    low, high, step = parameter.low, parameter.high, parameter.step
    if low is None or high is None:
        lacking = "low" if low is None else "high"
        yield Problem(f"{path}.{lacking}", "missing-value", "got none; expected both ends of the range, or a list of choices")
        return
    if low >= high:
        yield Problem(f"{path}.low", "contradiction", f"got {low:g}; expected below high, {high:g}")
        return
    if parameter.log and low <= 0:
        yield Problem(f"{path}.low", "too-small", f"got {low:g}; expected above 0, since log is true")
    if parameter.log and step is not None:
        yield Problem(f"{path}.step", "contradiction", f"got {step:g}; expected null, as log is true. Try a list of choices")
    if step is not None and parameter.count < 2:
        yield Problem(f"{path}.step", "too-large", f"got {step:g}; expected at most {high - low:g}, the width of the range")
    if is_whole(key, parameter):
        for name, value in {"low": low, "high": high, "step": step}.items():
            if value is not None and not float(value).is_integer():
                yield Problem(f"{path}.{name}", "wrong-type", f"got {value:g}; expected a whole number, as {key} takes")


def _sampler(search: SearchConfig) -> Iterator[Problem]:
    """Yield the problems of a sampler with parameters that are each valid."""
    if search.sampler == "grid":
        without = [key for key, item in search.parameters.items() if item.choices is None and item.step is None]
        for key in without:
            message = "got none; expected the step between points of the grid, or a list of choices in place of the range"
            yield Problem(f"search.parameters.{key}.step", "missing-value", message)
        size = 0 if without else math.prod(parameter.count for parameter in search.parameters.values())
        if size > MOST_POINTS:
            yield Problem("search.sampler", "too-large", f"got a grid of {size:,} points; expected at most {MOST_POINTS:,}")
        elif size and search.trials not in (None, size):
            message = f"got {search.trials}; expected null or {size}, the number of points of the grid"
            yield Problem("search.trials", "contradiction", message)
    elif search.trials is None:
        message = f"got none; expected the number of trials, because the sampler is {search.sampler}"
        yield Problem("search.trials", "missing-value", message)
    if search.sampler == "cmaes":
        for key, parameter in search.parameters.items():
            if parameter.choices is not None:
                yield Problem(f"search.parameters.{key}", "unsupported", "cmaes draws from ranges only. Try sampler=tpe")
        if len(search.parameters) < 2:
            yield Problem("search.sampler", "unsupported", "cmaes needs at least two parameters. Try tpe")
