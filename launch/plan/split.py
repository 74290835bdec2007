"""Whether the same nodes, divided otherwise between training and generation, would make a shorter step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeline import config
from pipeline.config import Recipe, RecipeError, generates

WORTH = 0.03  # of a step: a smaller gain is within what an estimate cannot tell


@dataclass(frozen=True, slots=True)
class Split:
    train: int  # nodes
    generate: int
    seconds: float  # of a step
    now: float

    @property
    def gain(self) -> float:
        """The share of a step that it would save."""
        return 1 - self.seconds / self.now

    def __str__(self) -> str:
        return f"cluster.train.nodes={self.train} cluster.generate.nodes={self.generate}"


def movable(recipe: Recipe) -> bool:
    """Whether a node of one component could as well be the other's."""
    train, generate = recipe.cluster.train, recipe.cluster.generate
    kinds = {(c.gpu, c.gpu_memory_gb, c.gpus_per_node, c.ranks_per_node, c.partition) for c in (train, generate)}
    apart = generates(recipe) and not config.colocated(recipe) and not recipe.cluster.share_nodes
    return apart and len(kinds) == 1 and train.gpus_per_node > 0 and train.nodes + generate.nodes > 2


def others(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with every other division that its layout allows."""
    train, generate = recipe.cluster.train, recipe.cluster.generate
    total = train.nodes + generate.nodes
    for nodes in range(1, total):
        if nodes != train.nodes:
            cluster = replace(
                recipe.cluster, train=replace(train, nodes=nodes), generate=replace(generate, nodes=total - nodes)
            )
            candidate = replace(recipe, cluster=cluster)
            if _allowed(candidate):
                yield candidate


def _allowed(recipe: Recipe) -> bool:
    try:
        config.validate(recipe)
    except RecipeError:
        return False
    return True


def better(recipe: Recipe, now: float, step: Callable[[Recipe], float | None]) -> Split | None:
    """The division with the shortest step, if it gains enough. now: seconds of a step as it is. step: those of another recipe,
    None if it does not fit."""
    found = [
        Split(other.cluster.train.nodes, other.cluster.generate.nodes, seconds, now)
        for other in others(recipe)
        if (seconds := step(other)) is not None
    ]
    best = min(found, key=lambda split: split.seconds, default=None)
    return best if best and best.gain > WORTH else None
