"""Plan the recipe on the same GPUs in other modes: asynchronous, synchronous and colocated.

    async        grpo.async_grpo or ppo.async_ppo: engines sample while the train ranks train
    sync         train and generate ranks have GPUs of their own and wait for each other
    colocated    train and generate ranks use all GPUs in turn

A mode is the plan of the recipe with a few keys changed, on the recipe's nodes. async and sync divide the nodes between
training and generation as the recipe does, or in another way if that is clearly faster. colocated uses all nodes, or the
largest number of them that the recipe's layout and batches allow. Modes are compared by GPU-hours. All modes are planned with
the recipe's number of answers in a step, although async does not support the batch_multiplier of dynamic sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.plan import placement, split
from launch.plan.estimate import Plan, elsewhere, step_elsewhere
from launch.plan.placement import Changes
from pipeline import config
from pipeline.algorithms.ahead import key_in, settings
from pipeline.config import Problem, Recipe, RecipeError, collected

ON_POLICY = ("sync", "colocated")
"""Modes that train only on tokens sampled with the current weights. They are preferred to async if it saves less than
`split.WORTH` of the GPU-hours."""
NAMES = ("async", *ON_POLICY)
SHARE: Changes = {"cluster.share_nodes": True}


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

    @property
    def moving(self) -> float:
        """Return the share of a step that colocated ranks spend on switching turns and copying weights; 0 in other modes."""
        computing = sum(phase.seconds for phase in self.plan.phases if phase.flops)
        return 1 - computing / self.plan.step if config.colocated(self.plan.recipe) else 0.0


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
            is_recipes_mode = name == mode_name(plan.recipe)
            modes += [Mode(name, {}, plan, _unfit(plan))] if is_recipes_mode else []
            modes += [_mode(plan, name)] if not is_recipes_mode or plan.split else []
    return modes


def choose(modes: Sequence[Mode]) -> Mode | None:
    """Return the mode with the fewest GPU-hours; None if no mode fits.

    Among modes that cost up to the share `split.WORTH` more than the cheapest, `_preference` decides.
    """
    fitting = [mode for mode in modes if not mode.why_not]
    least = min((mode.cost for mode in fitting), default=0.0)
    return next((mode for mode in sorted(fitting, key=_preference) if mode.cost * (1 - split.WORTH) <= least), None)


def _preference(mode: Mode) -> tuple[bool, bool, int]:
    """Return the sort key of a mode: on-policy modes before async, then the unchanged recipe before changed ones."""
    return mode.name == "async", bool(mode.changes), NAMES.index(mode.name)


def _mode(plan: Plan, name: str) -> Mode:
    with collected(refused := []):
        if (best := plan.split) and name == mode_name(plan.recipe):
            variant = _as_much(config.changed(plan.recipe, split.values(best.key, best.train, best.generate)), plan.recipe)
        else:
            variant = _best(plan, _ways(plan.recipe, name))
        same_cluster = variant.cluster == plan.recipe.cluster
        estimate = replace(plan, recipe=variant, split=None) if same_cluster else elsewhere(plan, variant)
        return Mode(name, _changes(plan.recipe, variant, name), estimate, _unfit(estimate))
    return Mode(name, {}, None, str(refused[0]))


def _unfit(plan: Plan) -> str:
    """Return the first reason why the plan does not fit; "" if it fits."""
    return "" if plan.fits else str(next(iter((*plan.problems(), *plan.warnings()))))


def _best(plan: Plan, ways: Sequence[Recipe]) -> Recipe:
    """Return the recipe with the shortest step, or the first recipe if no step is clearly shorter than its own.

    All steps are assumed to have the refit of `plan`.
    """
    if len(ways) == 1:
        return ways[0]
    steps = [step_elsewhere(plan, recipe) or math.inf for recipe in ways]
    least = min(steps)
    return ways[0] if steps[0] * (1 - split.WORTH) <= least else ways[steps.index(least)]


def _ways(recipe: Recipe, name: str) -> list[Recipe]:
    """Return the recipe in the mode `name` once for each valid division of its nodes, with its own division first.

    For colocated return only the recipe with the most nodes. Raises RecipeError if no division is valid.
    """
    keys, ways, refused = _keys(recipe, name), [], []
    for division in _divisions(recipe, name):
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


def _divisions(recipe: Recipe, name: str) -> Iterator[Changes]:
    """Yield the keys of each division of the nodes that a mode allows; {} is the recipe's own division.

    Raises RecipeError if the nodes cannot run the mode.
    """
    train, generate = recipe.cluster.train, recipe.cluster.generate
    shared, in_turn = recipe.cluster.share_nodes, config.colocated(recipe)
    if name == "colocated":
        if shared:
            yield split.values("gpus_per_node", *[train.gpus_per_node + generate.gpus_per_node] * 2)
            return
        if not split.alike(recipe):
            message = "got nodes of another kind than cluster.train; expected the same kind"
            raise RecipeError(Problem("cluster.generate", "contradiction", message))
        nodes = train.nodes + generate.nodes
        node_counts = {size for sizes in split.halves(nodes) for size in sizes}
        yield from (split.values("nodes", count, count) for count in (nodes, *sorted(node_counts, reverse=True)))
        return
    if not in_turn:
        yield {}
        if split.movable(recipe):
            yield from split.divisions(recipe)
    elif train.nodes > 1:
        yield from (split.values("nodes", *sizes) for sizes in split.halves(train.nodes))
    elif train.gpus_per_node > 1 and train.ranks_per_node is None:
        yield from (SHARE | split.values("gpus_per_node", *sizes) for sizes in split.halves(train.gpus_per_node))
    else:
        message = "cannot divide one train node; expected at least two train nodes, or two GPUs per node without ranks_per_node"
        raise RecipeError(Problem("cluster.train.gpus_per_node", "too-small", message))


def _changes(recipe: Recipe, variant: Recipe, name: str) -> Changes:
    sizes = {}
    for key in ("nodes", "gpus_per_node"):
        sizes |= split.values(key, *(getattr(part, key) for part in (variant.cluster.train, variant.cluster.generate)))
    return placement.differing(recipe, _keys(recipe, name) | sizes | {"cluster.share_nodes": variant.cluster.share_nodes})


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
