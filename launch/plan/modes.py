"""The same recipe and GPUs in other ways: sampling ahead of training, in turn, and on GPUs that both share.

    async        grpo.async_grpo: engines go on while the train ranks learn
    sync         each waits for the other, on ranks of its own
    colocated    train and generate ranks have all GPUs in turn

Each is the estimate of the recipe with a few keys changed, on the nodes that it has: async and sync divide them as the recipe
does, or otherwise if that is clearly better; colocated takes all of them, or as many as the layout divides. What is compared is
GPU-hours. All sample as many answers, also where dynamic sampling has a batch_multiplier, which async has not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch import placement
from launch.plan import split
from launch.plan.estimate import Plan, elsewhere, step_elsewhere
from pipeline import config
from pipeline.config import Recipe, RecipeError, collected

ON_POLICY = ("sync", "colocated")
"""What is chosen before async where that saves less than `split.WORTH`: every token is of the weights that are trained."""
NAMES = ("async", *ON_POLICY)


@dataclass(frozen=True)
class Mode:
    name: str
    changes: Mapping[str, Any]  # values by dotted key, which make it of the recipe; none for the recipe as it is
    plan: Plan | None  # None: the recipe is refused so
    why_not: str = ""  # why it is refused or does not fit

    @property
    def cost(self) -> float:
        """GPU-seconds of a step."""
        return self.plan.gpus * self.plan.step

    @property
    def moving(self) -> float:
        """The share of a step in which GPUs change hands, and weights go through the host."""
        computing = sum(phase.seconds for phase in self.plan.phases if phase.flops)
        return 1 - computing / self.plan.step if config.colocated(self.plan.recipe) else 0.0


def of(recipe: Recipe) -> str:
    """Return the name of the recipe's own mode."""
    if config.colocated(recipe):
        return "colocated"
    return "async" if config.runs_ahead(recipe) else "sync"


def compare(plan: Plan) -> list[Mode]:
    """Return all modes, the recipe's own among them; none where its times are not told."""
    return [_mode(plan, name) for name in NAMES] if plan.phases and plan.generate else []


def choose(modes: Sequence[Mode]) -> Mode | None:
    """Return the mode with the fewest GPU-hours; None if none fits."""
    fitting = {mode.name: mode for mode in modes if not mode.why_not}
    least = min((mode.cost for mode in fitting.values()), default=0.0)
    order = (fitting[name] for name in (*ON_POLICY, "async") if name in fitting)
    return next((mode for mode in order if mode.cost * (1 - split.WORTH) <= least), None)


def _mode(plan: Plan, name: str) -> Mode:
    if name == of(plan.recipe):
        return Mode(name, {}, plan, _unfit(plan))
    with collected(refused := []):
        other = _best(plan, _ways(plan.recipe, name))
        same = other.cluster == plan.recipe.cluster
        made = replace(plan, recipe=other, split=None) if same else elsewhere(plan, other)
        return Mode(name, _changes(plan.recipe, other, name), made, _unfit(made))
    return Mode(name, {}, None, refused[0])


def _unfit(plan: Plan) -> str:
    return "" if plan.fits else next(iter((*plan.problems(), *plan.warnings())))


def _best(plan: Plan, ways: Sequence[Recipe]) -> Recipe:
    """Return the way with the shortest step, but for the refit; the first if no other's is clearly shorter."""
    if len(ways) == 1:
        return ways[0]
    steps = [step_elsewhere(plan, recipe) or math.inf for recipe in ways]
    least = min(steps)
    return ways[0] if steps[0] * (1 - split.WORTH) <= least else ways[steps.index(least)]


def _ways(recipe: Recipe, name: str) -> list[Recipe]:
    """Return the recipe made so with each division of its nodes that is allowed, its own first; of colocated ones the largest
    alone. Raises RecipeError if none is."""
    base, found, refused = config.changed(recipe, _keys(recipe, name)), [], []
    for train, generate in _divisions(recipe, name):
        parts = {"train": replace(base.cluster.train, nodes=train), "generate": replace(base.cluster.generate, nodes=generate)}
        other = replace(base, cluster=replace(base.cluster, **parts))
        with collected(refused):
            config.validate(other)
            found.append(_as_much(other, recipe))
            if name == "colocated":
                break
    if not found:
        raise RecipeError(refused[0])
    return found


def _as_much(other: Recipe, recipe: Recipe) -> Recipe:
    """Return the other recipe with as many answers as the recipe has sampled in a step."""
    return replace(other, grpo=replace(other.grpo, batch_multiplier=recipe.grpo.batch_multiplier))


def _divisions(recipe: Recipe, name: str) -> Iterator[tuple[int, int]]:
    """Yield nodes of train and generate ranks. Raises RecipeError if the nodes cannot be used so."""
    train, generate = recipe.cluster.train, recipe.cluster.generate
    total = train.nodes if config.colocated(recipe) else train.nodes + generate.nodes
    if name == "colocated":
        if not split.alike(recipe):
            raise RecipeError("cluster.generate: got other nodes than cluster.train has; expected the same")
        yield from ((nodes, nodes) for nodes in range(total, 0, -1))
        return
    if total == 1:
        raise RecipeError("cluster.train.nodes: got 1; expected a node for each component at least")
    if not config.colocated(recipe):
        yield train.nodes, generate.nodes
    if config.colocated(recipe) or split.movable(recipe):
        yield from ((nodes, total - nodes) for nodes in range(1, total))


def _changes(recipe: Recipe, other: Recipe, name: str) -> dict[str, Any]:
    nodes = {f"cluster.{part}.nodes": getattr(other.cluster, part).nodes for part in ("train", "generate")}
    return placement.differing(recipe, _keys(recipe, name) | nodes)


def _keys(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return values by dotted key, without nodes. Raises RecipeError."""
    if name == "colocated":
        return placement.in_turn(recipe)
    keys: dict[str, Any] = {"policy.generation.colocated.enabled": False} if config.colocated(recipe) else {}
    if name == "sync":
        return keys | ({"grpo.async_grpo.enabled": False} if config.runs_ahead(recipe) else {})
    if recipe.algorithm != "grpo":
        raise RecipeError(f"algorithm: got {recipe.algorithm}; expected grpo, which alone samples ahead (grpo.async_grpo)")
    ahead = {"enabled": True, "in_flight_weight_updates": True}
    ahead["max_trajectory_age_steps"] = max(1, recipe.grpo.async_grpo.max_trajectory_age_steps)
    keys |= {f"grpo.async_grpo.{key}": value for key, value in ahead.items()}
    if recipe.grpo.batch_multiplier != 1:
        keys["grpo.batch_multiplier"] = 1.0
    return keys | {"loss_fn.use_importance_sampling_correction": True}
