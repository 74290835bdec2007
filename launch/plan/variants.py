"""Plan the recipe on the same GPUs in other ways: in another mode, or with another division between training and generation.

    async        grpo.async_grpo or ppo.async_ppo: engines sample while the train ranks train
    sync         train and generate ranks have GPUs of their own and wait for each other
    colocated    train and generate ranks use all GPUs in turn

A variant is the plan of the recipe with a few keys changed, on the recipe's nodes. async and sync divide the nodes, or the GPUs
of shared nodes, as the recipe does, or in another way if that is clearly faster. colocated uses all nodes, or the largest
number of them that the recipe's layout and batches allow. Modes are compared by GPU-hours, all with the recipe's number of
answers in a step, although async does not support the batch_multiplier of dynamic sampling.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launch.plan import placement
from launch.plan.placement import Changes
from launch.terminal.units import seconds
from pipeline import config
from pipeline.algorithms.ahead import key_in, settings
from pipeline.config import Problem, Recipe, RecipeError, collected

if TYPE_CHECKING:
    from launch.plan.estimate import Plan

WORTH = 0.03  # share of a step or of a cost: a smaller gain is assumed to be within the error of the estimate
MOST = 32  # divisions that are tried: about 3% of the nodes lie between two of them
NAMES = ("async", "sync", "colocated")
"""The modes. Those after async train only on tokens sampled with the current weights. They are preferred to async if it saves
less than WORTH of the GPU-hours."""
SHARE: Changes = {"cluster.share_nodes": True}
Line = str | tuple[str, str]
"""A line to print as it is, or (label, text to wrap)."""
WIDTH = 128  # of the report
WIDTHS = (12, 6, 10, 14, 14, 14)


# ---- divisions of the nodes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """A division of nodes, or of the GPUs of shared nodes, between training and generation."""

    changes: Changes
    seconds: float  # seconds of a step
    now: float  # seconds of a step with the recipe's own division; infinity if that does not fit

    @property
    def gain(self) -> float:
        """Return the share of a step's time that the division saves."""
        return 1 - self.seconds / self.now

    def __str__(self) -> str:
        return _overrides(self.changes)


def movable(recipe: Recipe) -> bool:
    """Return whether a node, or a GPU of shared nodes, can move from one component to the other."""
    train, generate = recipe.cluster.train, recipe.cluster.generate
    if not config.generates(recipe) or config.colocated(recipe) or not train.gpus_per_node:
        return False
    if recipe.cluster.share_nodes:
        return train.gpus_per_node + generate.gpus_per_node > 2 and train.ranks_per_node is generate.ranks_per_node is None
    return _alike(recipe) and train.nodes + generate.nodes > 2


def _alike(recipe: Recipe) -> bool:
    """Return whether both components have the same kind of nodes."""
    parts = recipe.cluster.train, recipe.cluster.generate
    return len({(c.gpu, c.gpu_memory_gb, c.gpus_per_node, c.ranks_per_node, c.partition) for c in parts}) == 1


def _values(key: str, train: int, generate: int) -> Changes:
    return {f"cluster.train.{key}": train, f"cluster.generate.{key}": generate}


def halves(total: int) -> Iterator[tuple[int, int]]:
    """Yield (train, generate) for the ways to divide `total` nodes or GPUs between the two components.

    If `total` is more than MOST, yield only those in which one number is a multiple of a power of two, roughly MOST in total.
    """
    step = 1
    while total > MOST * step:
        step *= 2
    yield from ((train, total - train) for train in range(1, total) if train % step == 0 or (total - train) % step == 0)


def divisions(recipe: Recipe) -> Iterator[Changes]:
    """Yield the keys of every division of the recipe's nodes, or of its shared nodes' GPUs, except its own division."""
    key = "gpus_per_node" if recipe.cluster.share_nodes else "nodes"
    own = getattr(recipe.cluster.train, key), getattr(recipe.cluster.generate, key)
    yield from (_values(key, *sizes) for sizes in halves(sum(own)) if sizes != own)


def better(plan: Plan) -> Split | None:
    """Return the other division with the shortest step; None without times, or if it saves at most the share WORTH."""
    if not plan.phases or not movable(plan.recipe):
        return None
    now, splits = plan.step if plan.fits else math.inf, []
    for division in divisions(plan.recipe):
        with collected([]):
            if (took := plan.step_elsewhere(config.changed(plan.recipe, division))) is not None:
                splits.append(Split(division, took, now))
    best = min(splits, key=lambda split: split.seconds, default=None)
    return best if best and best.gain > WORTH else None


# ---- modes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """The recipe in one mode, with its estimate."""

    name: str
    changes: Changes  # keys that select the mode; empty for the recipe as it is
    estimate: Plan | None  # None: the recipe is invalid in this mode
    why_not: str = ""  # why it is invalid or does not fit

    @property
    def plan(self) -> Plan:
        """Return the plan of the recipe in this mode, in which the recipe must be valid."""
        assert self.estimate is not None, self.why_not
        return self.estimate

    @property
    def cost(self) -> float:
        """Return the GPU-seconds of a step."""
        return self.plan.gpus * self.plan.step


def mode_name(recipe: Recipe) -> str:
    """Return the name of the recipe's own mode."""
    if config.colocated(recipe):
        return "colocated"
    return "async" if config.runs_ahead(recipe) else "sync"


def compare(plan: Plan) -> list[Mode]:
    """Return the recipe in all modes; empty if the plan has no durations or the algorithm does not sample.

    The recipe's own mode appears without changes, and a second time with another division of its nodes if that is better.
    """
    modes: list[Mode] = []
    if plan.phases and plan.generate:
        for name in NAMES:
            own = name == mode_name(plan.recipe)
            modes += [Mode(name, {}, plan, _unfit(plan))] if own else []
            modes += [_mode(plan, name)] if not own or plan.split else []
    return modes


def choose(modes: Sequence[Mode]) -> Mode | None:
    """Return the mode with the fewest GPU-hours; None if no mode fits.

    Among modes that cost up to the share WORTH more than the cheapest, those before async and unchanged recipes come first.
    """
    fitting = [mode for mode in modes if not mode.why_not]
    least = min((mode.cost for mode in fitting), default=0.0)
    fitting.sort(key=lambda mode: (mode.name == "async", bool(mode.changes), NAMES.index(mode.name)))
    return next((mode for mode in fitting if mode.cost * (1 - WORTH) <= least), None)


def _mode(plan: Plan, name: str) -> Mode:
    with collected(refused := []):
        if plan.split and name == mode_name(plan.recipe):
            variant = _as_much(config.changed(plan.recipe, plan.split.changes), plan.recipe)
        else:
            variant = _best(plan, _ways(plan.recipe, name))
        same_cluster = variant.cluster == plan.recipe.cluster
        estimate = replace(plan, recipe=variant, split=None) if same_cluster else plan.elsewhere(variant)
        return Mode(name, _changes(plan.recipe, variant, name), estimate, _unfit(estimate))
    return Mode(name, {}, None, str(refused[0]))


def _unfit(plan: Plan) -> str:
    """Return the first reason why the plan does not fit; "" if it fits."""
    return "" if plan.fits else str(next(iter((*plan.problems(), *plan.warnings()))))


def _best(plan: Plan, ways: Sequence[Recipe]) -> Recipe:
    """Return the recipe with the shortest step, or the first recipe if no step is clearly shorter than its own."""
    if len(ways) == 1:
        return ways[0]
    steps = [plan.step_elsewhere(recipe) or math.inf for recipe in ways]
    least = min(steps)
    return ways[0] if steps[0] * (1 - WORTH) <= least else ways[steps.index(least)]


def _ways(recipe: Recipe, name: str) -> list[Recipe]:
    """Return the recipe in the mode `name` once for each valid division of its nodes, with its own division first.

    For colocated return only the recipe with the most nodes. Raises RecipeError if no division is valid.
    """
    keys, ways, refused = _keys(recipe, name), [], []
    for division in _divisions_of(recipe, name):
        with collected(refused):
            ways.append(_as_much(config.changed(recipe, keys | division), recipe))
            if name == "colocated":
                break
    if not ways:
        raise RecipeError(refused[0])
    return ways


def _as_much(variant: Recipe, recipe: Recipe) -> Recipe:
    """Return `variant` with the batch_multiplier of `recipe`, so that both sample the same number of answers in a step."""
    if not isinstance(section := config.section(recipe), config.RewardedConfig):
        return variant
    rewarded: Any = replace(config.section(variant), batch_multiplier=section.batch_multiplier)  # type: ignore[call-arg]
    return replace(variant, **{recipe.algorithm: rewarded})


def _divisions_of(recipe: Recipe, name: str) -> Iterator[Changes]:
    """Yield the keys of each division of the nodes that a mode allows; {} is the recipe's own division.

    Raises RecipeError if the nodes cannot run the mode.
    """
    train, generate = recipe.cluster.train, recipe.cluster.generate
    if name == "colocated":
        if recipe.cluster.share_nodes:
            yield _values("gpus_per_node", *[train.gpus_per_node + generate.gpus_per_node] * 2)
            return
        if not _alike(recipe):
            message = "got nodes of another kind than cluster.train; expected the same kind"
            raise RecipeError(Problem("cluster.generate", "contradiction", message))
        nodes = train.nodes + generate.nodes
        counts = sorted({size for sizes in halves(nodes) for size in sizes}, reverse=True)
        yield from (_values("nodes", count, count) for count in (nodes, *counts))
    elif not config.colocated(recipe):
        yield {}
        if movable(recipe):
            yield from divisions(recipe)
    elif train.nodes > 1:
        yield from (_values("nodes", *sizes) for sizes in halves(train.nodes))
    elif train.gpus_per_node > 1 and train.ranks_per_node is None:
        yield from (SHARE | _values("gpus_per_node", *sizes) for sizes in halves(train.gpus_per_node))
    else:
        message = "cannot divide one train node; expected at least two train nodes, or two GPUs per node without ranks_per_node"
        raise RecipeError(Problem("cluster.train.gpus_per_node", "too-small", message))


def _changes(recipe: Recipe, variant: Recipe, name: str) -> Changes:
    cluster, sizes = variant.cluster, {"cluster.share_nodes": variant.cluster.share_nodes}
    for key in ("nodes", "gpus_per_node"):
        sizes |= _values(key, getattr(cluster.train, key), getattr(cluster.generate, key))
    return placement.differing(recipe, _keys(recipe, name) | sizes)


def _keys(recipe: Recipe, name: str) -> Changes:
    """Return the changes of keys that select a mode, without the sizes of components. Raises RecipeError."""
    if name == mode_name(recipe):
        return {}
    if name == "colocated":
        return placement.colocation(recipe)
    key = key_in(config.section(recipe), recipe.algorithm)
    keys: Changes = {"policy.generation.colocated.enabled": False} if config.colocated(recipe) else {}
    if name == "sync":
        return keys | ({f"{key}.enabled": False} if config.runs_ahead(recipe) else {})
    section = settings(recipe)
    if section is None:
        message = f"got {recipe.algorithm}; expected grpo or ppo, which can sample ahead (grpo.async_grpo, ppo.async_ppo)"
        raise RecipeError(Problem("algorithm", "unsupported", message))
    age = max(1, section.max_trajectory_age_steps)
    ahead = {"enabled": True, "in_flight_weight_updates": True, "max_trajectory_age_steps": age}
    keys |= {f"{key}.{name}": value for name, value in ahead.items()}
    if getattr(recipe, recipe.algorithm).batch_multiplier != 1:
        keys[f"{recipe.algorithm}.batch_multiplier"] = 1.0
    return keys | ({} if recipe.loss_fn.use_generation_logprobs else {"loss_fn.use_importance_sampling_correction": True})


# ---- the report ---------------------------------------------------------------------------------------------------------


def mode_table(plan: Plan, compared: Sequence[Mode]) -> Iterator[Line]:
    """Yield the lines of a table of the modes, then a line with the recommended mode."""
    cost = "GPU-hours" if plan.steps else "GPU-s a step"
    columns = zip(("nodes", "GPUs", "a step", cost, "train waits", "engines wait"), WIDTHS, strict=True)
    yield f"{'the same nodes':26s}" + "".join(f"{name:>{width}s}" for name, width in columns)
    for mode in compared:
        name = mode.name if mode.changes or mode.estimate is None else f"{mode.name}, as it is"
        if mode.why_not:
            why = f"not possible: {mode.why_not}"
            yield textwrap.fill(why, WIDTH, initial_indent=f"  {name:24s}", subsequent_indent=" " * 26)
            continue
        yield f"  {name:24s}" + "".join(f"{cell:>{width}}" for cell, width in zip(_cells(mode), (*WIDTHS, 0), strict=True))
        if (spare := plan.gpus - mode.plan.gpus) > 0:
            yield f"  {'':24s}{spare} GPU{'s' * (spare > 1)} of the recipe's {plan.gpus} would stay unused"
    yield "choice", choice(compared)


def _cells(mode: Mode) -> list[str]:
    plan, cluster = mode.plan, mode.plan.recipe.cluster
    cells = [str(plan.gpus), seconds(plan.step), f"{mode.cost if plan.gpu_hours is None else plan.gpu_hours:,.0f}"]
    if config.colocated(plan.recipe):
        moving = 1 - sum(phase.seconds for phase in plan.phases if phase.flops) / plan.step
        return [str(cluster.train.nodes), *cells, "-", "-", f"   {moving:.0%} for switching turns"]
    key = "gpus_per_node" if cluster.share_nodes else "nodes"
    parts = (cluster.train, cluster.generate, *((cluster.reward,) if config.serves_rewards(plan.recipe) else ()))
    nodes = f"{' + '.join(str(getattr(part, key)) for part in parts)}{' GPUs' if cluster.share_nodes else ''}"
    return [nodes, *cells, *(f"{idle / plan.step:.0%}" for idle in (plan.step_time.train, plan.step_time.generate)), ""]


def choice(compared: Sequence[Mode]) -> str:
    """Return a text: the recommended mode, its GPU-hours compared with the other modes', and the keys that select it."""
    best = choose(compared)
    if best is None:
        return "no mode fits"
    against = []
    for mode in compared:
        if mode is best or mode.why_not:
            continue
        name = "the recipe as it is" if mode.name == best.name and not mode.changes else mode.name
        if best.cost <= mode.cost:
            against.append(f"{1 - best.cost / mode.cost:.0%} fewer GPU-hours than {name}")
        else:
            but = ", but trains on older rollouts" if mode.name == "async" else ""
            against.append(f"{name} takes {1 - mode.cost / best.cost:.0%} fewer GPU-hours{but}")
    keys = _overrides(best.changes)
    return "; ".join([f"{best.name}: {', '.join(against) or 'no other mode fits'}", *([keys] if keys else [])])


def _overrides(changes: Changes) -> str:
    return " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in changes.items())


def division(plan: Plan) -> str:
    """Return a text about the best other division of the nodes."""
    estimated = "by these estimates only; measure a few steps to be sure"
    by = f"as measured in {plan.measured.where}" if plan.measured and plan.ratios else estimated
    if plan.split is None:
        return f"no other division {'is clearly faster' if plan.fits else 'fits either'}, {by}"
    gain = f"{plan.split.gain:.0%} less" if plan.fits else "and fits"
    return f"{plan.split} would take {seconds(plan.split.seconds)} a step, {gain}, {by}"
