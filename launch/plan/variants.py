"""Plan the recipe on the same GPUs in other modes.

    async        grpo.async_grpo or ppo.async_ppo: engines sample while the train ranks train
    sync         train and generate ranks have GPUs of their own and wait for each other
    colocated    train and generate ranks use all GPUs in turn

A variant is the plan of the recipe with a few keys changed, on the recipe's nodes. async and sync divide the nodes, or the GPUs
of shared nodes, as the recipe does; those of a colocated recipe are halved. Modes are compared by GPU-hours, all with the
recipe's number of answers in a step, although async does not support the batch_multiplier of dynamic sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launch.plan import placement
from launch.plan.placement import Changes
from pipeline import config
from pipeline.algorithms.ahead import key_in, settings
from pipeline.config import Problem, Recipe, RecipeError, collected

if TYPE_CHECKING:
    from launch.plan.estimate import Plan

WORTH = 0.03  # share of a cost: a smaller gain is assumed to be within the error of the estimate
NAMES = ("async", "sync", "colocated")
"""The modes. Those after async train only on tokens sampled with the current weights. They are preferred to async if it saves
less than WORTH of the GPU-hours."""


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
    """Return the recipe in all modes; empty if the plan has no durations or the algorithm does not sample."""
    return [_mode(plan, name) for name in NAMES] if plan.phases and plan.generate else []


def choose(modes: Sequence[Mode]) -> Mode | None:
    """Return the mode with the fewest GPU-hours; None if no mode fits.

    Among modes that cost up to the share WORTH more than the cheapest, those before async come first.
    """
    fitting = [mode for mode in modes if not mode.why_not]
    least = min((mode.cost for mode in fitting), default=0.0)
    fitting.sort(key=lambda mode: (mode.name == "async", bool(mode.changes)))
    return next((mode for mode in fitting if mode.cost * (1 - WORTH) <= least), None)


def choice(compared: Sequence[Mode]) -> str:
    """Return a text: the recommended mode, its GPU-hours compared with the other modes', and the keys that select it."""
    best = choose(compared)
    if best is None:
        return "no mode fits"
    against = []
    for mode in compared:
        if mode is best or mode.why_not:
            continue
        if best.cost <= mode.cost:
            against.append(f"{1 - best.cost / mode.cost:.0%} fewer GPU-hours than {mode.name}")
        else:
            but = ", but trains on older rollouts" if mode.name == "async" else ""
            against.append(f"{mode.name} takes {1 - mode.cost / best.cost:.0%} fewer GPU-hours{but}")
    keys = " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in best.changes.items())
    return "; ".join([f"{best.name}: {', '.join(against) or 'no other mode fits'}", *([keys] if keys else [])])


def _mode(plan: Plan, name: str) -> Mode:
    if name == mode_name(plan.recipe):
        return Mode(name, {}, plan, _unfit(plan))
    with collected(refused := []):
        changes = _keys(plan.recipe, name) | _sizes(plan.recipe, name)
        estimate = plan.elsewhere(_as_much(config.changed(plan.recipe, changes), plan.recipe))
        return Mode(name, placement.differing(plan.recipe, changes), estimate, _unfit(estimate))
    return Mode(name, {}, None, str(refused[0]))


def _unfit(plan: Plan) -> str:
    """Return the first reason why the plan does not fit; "" if it fits."""
    return "" if plan.fits else str(next(iter((*plan.problems(), *plan.warnings()))))


def _as_much(variant: Recipe, recipe: Recipe) -> Recipe:
    """Return `variant` with the batch_multiplier of `recipe`, so that both sample the same number of answers in a step."""
    if not isinstance(section := config.section(recipe), config.RewardedConfig):
        return variant
    rewarded: Any = replace(config.section(variant), batch_multiplier=section.batch_multiplier)  # type: ignore[call-arg]
    return replace(variant, **{recipe.algorithm: rewarded})


def _sizes(recipe: Recipe, name: str) -> Changes:
    """Return the changes of the components' sizes that a mode needs. Raises RecipeError if the nodes cannot run the mode."""
    train, generate = recipe.cluster.train, recipe.cluster.generate
    if name == "colocated":
        kinds = {(c.gpu, c.gpu_memory_gb, c.gpus_per_node, c.ranks_per_node, c.partition) for c in (train, generate)}
        if len(kinds) > 1 and not recipe.cluster.share_nodes:
            message = "got nodes of another kind than cluster.train; expected the same kind"
            raise RecipeError(Problem("cluster.generate", "contradiction", message))
        key = "gpus_per_node" if recipe.cluster.share_nodes else "nodes"
        total = getattr(train, key) + getattr(generate, key)
        return _values(key, total, total)
    if not config.colocated(recipe):
        return {}
    if train.nodes > 1:
        return _values("nodes", train.nodes - train.nodes // 2, train.nodes // 2)
    if train.gpus_per_node > 1 and train.ranks_per_node is None:
        half = train.gpus_per_node // 2
        return {"cluster.share_nodes": True} | _values("gpus_per_node", train.gpus_per_node - half, half)
    message = "cannot divide one train node; expected at least two train nodes, or two GPUs per node without ranks_per_node"
    raise RecipeError(Problem("cluster.train.gpus_per_node", "too-small", message))


def _values(key: str, train: int, generate: int) -> Changes:
    return {f"cluster.train.{key}": train, f"cluster.generate.{key}": generate}


def _keys(recipe: Recipe, name: str) -> Changes:
    """Return the changes of keys that select a mode, without the sizes of components. Raises RecipeError."""
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
