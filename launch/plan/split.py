"""Find other divisions of the nodes, or of the GPUs of shared nodes, between training and generation that shorten a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launch.plan.placement import Changes
from pipeline import config
from pipeline.config import Recipe, collected, generates

WORTH = 0.03  # share of a step: a smaller gain is assumed to be within the error of the estimate
MOST = 32  # divisions that are tried: about 3% of the nodes lie between two of them


@dataclass(frozen=True, slots=True)
class Split:
    """A division of nodes, or of the GPUs of shared nodes, between training and generation."""

    key: str  # the key that sets the division: nodes, or gpus_per_node on shared nodes
    train: int  # the key's value in cluster.train
    generate: int  # the key's value in cluster.generate
    seconds: float  # seconds of a step
    now: float  # seconds of a step with the recipe's own division; infinity if that does not fit

    @property
    def gain(self) -> float:
        """Return the share of a step's time that the division saves."""
        return 1 - self.seconds / self.now

    def __str__(self) -> str:
        return f"cluster.train.{self.key}={self.train} cluster.generate.{self.key}={self.generate}"


def movable(recipe: Recipe) -> bool:
    """Return whether a node, or a GPU of shared nodes, can move from one component to the other."""
    train, generate = recipe.cluster.train, recipe.cluster.generate
    if not generates(recipe) or config.colocated(recipe) or not train.gpus_per_node:
        return False
    if recipe.cluster.share_nodes:
        return train.gpus_per_node + generate.gpus_per_node > 2 and train.ranks_per_node is generate.ranks_per_node is None
    return alike(recipe) and train.nodes + generate.nodes > 2


def alike(recipe: Recipe) -> bool:
    """Return whether both components have the same kind of nodes."""
    parts = recipe.cluster.train, recipe.cluster.generate
    return len({(c.gpu, c.gpu_memory_gb, c.gpus_per_node, c.ranks_per_node, c.partition) for c in parts}) == 1


def key_of(recipe: Recipe) -> str:
    """Return the key that divides the nodes, or the GPUs of shared nodes, between the components."""
    return "gpus_per_node" if recipe.cluster.share_nodes else "nodes"


def sizes(recipe: Recipe) -> tuple[int, int]:
    """Return the values of `key_of(recipe)` in cluster.train and cluster.generate."""
    return getattr(recipe.cluster.train, key_of(recipe)), getattr(recipe.cluster.generate, key_of(recipe))


def values(key: str, train: int, generate: int) -> Changes:
    """Return dotted key -> value, for the key `key` of cluster.train and of cluster.generate."""
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
    own_sizes = sizes(recipe)
    yield from (values(key_of(recipe), *other_sizes) for other_sizes in halves(sum(own_sizes)) if other_sizes != own_sizes)


def others(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe once for each other division with which it is valid."""
    for division in divisions(recipe):
        with collected([]):
            yield config.changed(recipe, division)


def better(recipe: Recipe, now: float, step: Callable[[Recipe], float | None]) -> Split | None:
    """Return the other division with the shortest step; None if it saves at most the share WORTH of a step.

    now: seconds of a step with the recipe's own division. step: a function from a recipe to the seconds of its step; it returns
    None if the recipe does not fit.
    """
    splits = [
        Split(key_of(variant), *sizes(variant), seconds, now)
        for variant in others(recipe)
        if (seconds := step(variant)) is not None
    ]
    best = min(splits, key=lambda split: split.seconds, default=None)
    return best if best and best.gain > WORTH else None
