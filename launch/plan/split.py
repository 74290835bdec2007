"""Finds divisions of the same nodes, or GPUs of shared nodes, between training and generation that make a shorter step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeline import config
from pipeline.config import Recipe, RecipeError, generates

WORTH = 0.03  # of a step: a smaller gain is within what an estimate cannot tell


@dataclass(frozen=True, slots=True)
class Split:
    key: str  # that divides: nodes, or gpus_per_node on shared nodes
    train: int  # its value
    generate: int
    seconds: float  # of a step
    now: float  # seconds of a step as it is; infinity if that does not fit

    @property
    def gain(self) -> float:
        """Return the share of a step that it would save."""
        return 1 - self.seconds / self.now

    def __str__(self) -> str:
        return f"cluster.train.{self.key}={self.train} cluster.generate.{self.key}={self.generate}"


def movable(recipe: Recipe) -> bool:
    """Return whether a node, or a GPU of shared nodes, of one component could as well be the other's."""
    train, generate = recipe.cluster.train, recipe.cluster.generate
    if not generates(recipe) or config.colocated(recipe) or not train.gpus_per_node:
        return False
    if recipe.cluster.share_nodes:
        return train.gpus_per_node + generate.gpus_per_node > 2 and train.ranks_per_node is generate.ranks_per_node is None
    return alike(recipe) and train.nodes + generate.nodes > 2


def alike(recipe: Recipe) -> bool:
    """Return whether the nodes of both components are the same."""
    parts = recipe.cluster.train, recipe.cluster.generate
    return len({(c.gpu, c.gpu_memory_gb, c.gpus_per_node, c.ranks_per_node, c.partition) for c in parts}) == 1


def key_of(recipe: Recipe) -> str:
    """Return the key of both components that divides their nodes, or the GPUs of shared nodes."""
    return "gpus_per_node" if recipe.cluster.share_nodes else "nodes"


def sizes(recipe: Recipe) -> tuple[int, int]:
    """Return that key's values of cluster.train and cluster.generate."""
    return getattr(recipe.cluster.train, key_of(recipe)), getattr(recipe.cluster.generate, key_of(recipe))


def others(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with every other division that its layout allows."""
    train, generate, key = recipe.cluster.train, recipe.cluster.generate, key_of(recipe)
    now = sizes(recipe)
    for own, rest in halves(sum(now)):
        if (own, rest) != now:
            cluster = replace(recipe.cluster, train=replace(train, **{key: own}), generate=replace(generate, **{key: rest}))
            candidate = replace(recipe, cluster=cluster)
            if _allowed(candidate):
                yield candidate


def halves(total: int) -> Iterator[tuple[int, int]]:
    """Yield the ways to divide a number of nodes or GPUs between train and generate ranks."""
    yield from ((train, total - train) for train in range(1, total))


def _allowed(recipe: Recipe) -> bool:
    try:
        config.validate(recipe)
    except RecipeError:
        return False
    return True


def better(recipe: Recipe, now: float, step: Callable[[Recipe], float | None]) -> Split | None:
    """Return the division with the shortest step, if it gains enough.

    now: seconds of a step as it is. step: those of another recipe, None if it does not fit.
    """
    found = [
        Split(key_of(other), *sizes(other), seconds, now) for other in others(recipe) if (seconds := step(other)) is not None
    ]
    best = min(found, key=lambda split: split.seconds, default=None)
    return best if best and best.gain > WORTH else None
