"""Plan the refit of a recipe without a job: the schedule that a run would use, and its estimated duration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.plan import refit_layouts, refit_time
from launch.recipes.model_files import planning_config
from pipeline.config import PRECISIONS, Recipe, colocated, ranks, ranks_per_node
from pipeline.models.shape import ModelShape
from pipeline.refit import plan

if TYPE_CHECKING:
    import numpy as np

    from launch.plan.refit_time import Broadcast, Demand, RefitSimulation
    from pipeline.refit.schedule import RefitSchedule


@dataclass(frozen=True)
class RefitPrediction:
    """The schedule of a refit and its simulated duration."""

    recipe: Recipe
    parameters: int  # parameters of the model; a refit transfers its buffers too
    schedule: RefitSchedule
    simulation: RefitSimulation
    demand: Demand
    reference: Broadcast

    @property
    def seconds(self) -> float:
        """Return the seconds of the refit, without the pause of generation."""
        return self.simulation.seconds

    @property
    def sent(self) -> np.ndarray:
        """Return the bytes that each train rank sends, [train ranks]."""
        return self.simulation.loads.sent.sum(0)[: ranks(self.recipe.cluster.train)]

    @property
    def received(self) -> np.ndarray:
        """Return the bytes that each generate rank receives, [generate ranks]."""
        return self.simulation.loads.received.sum(0)[ranks(self.recipe.cluster.train) :]

    @property
    def floor(self) -> tuple[float, str]:
        """Return (lower bound of the seconds of any transfer on this network, name of the limit that sets it)."""
        return refit_time.floor(self.demand, self.recipe.cluster.network)


def predict(recipe: Recipe, model: Mapping[str, Any] | None = None) -> RefitPrediction:
    """Return the planned refit of a recipe, with its estimated duration. The recipe's train backend must be chosen.

    model: the policy's config.json; None: read it from the recipe's model. Raises ValueError, or its subclass RecipeError, if
    the layouts are unknown or incompatible.
    """
    # Late imports, so that mistakes on the command line are reported fast.
    nodes, network = node_names(recipe), recipe.cluster.network
    itemsize, bucket = PRECISIONS[recipe.policy.precision], recipe.policy.generation.refit_cfg.bucket_bytes
    model = model or planning_config(recipe.policy)
    assert model is not None  # None only for a model that a needed run has not written yet
    owners = refit_layouts.recipe_layouts(model, recipe)
    schedule = plan.schedule(owners.train, owners.generate, owners.engines, owners.shapes, itemsize, bucket, nodes, network)
    number = {name: i for i, name in enumerate(dict.fromkeys(nodes.values()))}
    node = np.array([number[nodes[rank]] for rank in range(len(nodes))])
    entries = sum(map(math.prod, owners.shapes.values()))
    return RefitPrediction(
        recipe,
        ModelShape.of(model).parameters,
        schedule,
        refit_time.simulate(refit_time.messages(schedule), node, network),
        refit_time.demand(schedule, node),
        refit_time.reference(schedule, node, entries * itemsize, bucket),
    )


def node_names(recipe: Recipe) -> dict[int, str]:
    """Return global rank -> name of its node."""
    names, cluster = [], recipe.cluster
    of_generate = "train" if colocated(recipe) or cluster.share_nodes else "generate"
    for realm, component in (("train", cluster.train), (of_generate, cluster.generate)):
        names += [f"{realm} node {rank // ranks_per_node(component)}" for rank in range(ranks(component))]
    return dict(enumerate(names))
