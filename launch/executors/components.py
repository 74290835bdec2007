"""Build the components of a recipe's job, with the environment variables of their ranks."""

from __future__ import annotations

from dataclasses import replace

from launch.executors import cuda_variables
from launch.executors.nodes import ColocatedComponent
from pipeline import config
from pipeline.config import (
    ComponentConfig,
    Recipe,
    colocated,
    components_on_train_nodes,
    determinism,
    served_judge_policy,
    serves_judge,
    trains,
)
from pipeline.node import python_path


def components(recipe: Recipe) -> dict[str, ComponentConfig]:
    """Return name -> component of the job in rank order, with the shared variables and sbatch options merged into each.

    A component's own values override the shared ones. Variables are set before Python starts, because libraries read some of
    them on import.
    """
    trainers = cuda_variables.for_train_ranks(recipe) if trains(recipe) else {}
    generators = cuda_variables.for_engines(recipe.policy, recipe.cluster.generate)
    variables = {"train": trainers, "generate": generators, "reward": trainers, "environment": recipe.cluster.generate.env_vars}
    if serves_judge(recipe):
        variables["judge"] = cuda_variables.for_engines(served_judge_policy(recipe), recipe.cluster.judge)
    options = recipe.cluster.sbatch_options
    parts = {
        name: replace(
            part,
            env_vars=_with_root({**variables[name], **determinism.variables(recipe, name), **part.env_vars}),
            sbatch_options={**options, **part.sbatch_options},
        )
        for name, part in config.components(recipe).items()
    }
    colocated_names = [name for name in components_on_train_nodes(recipe) if name in parts and "train" in parts]
    return parts | {name: ColocatedComponent(**vars(parts[name]), shares_gpus=colocated(recipe)) for name in colocated_names}


def _with_root(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables, with Hetstep's folder first in PYTHONPATH if they have one, which replaces the launcher's."""
    return python_path.with_package(variables) if "PYTHONPATH" in variables else variables
