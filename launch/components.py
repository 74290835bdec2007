"""The components of a recipe's job, with the environment that their ranks start with."""

from __future__ import annotations

from dataclasses import replace

from launch import cuda_variables
from launch.nodes import Guest
from pipeline import config
from pipeline.config import ComponentConfig, Recipe, colocated, uses_megatron


def components(recipe: Recipe) -> dict[str, ComponentConfig]:
    """The job's components, in rank order, with what concerns all of them; their own goes before that.

    Backends' variables are set before Python starts: some are read on import.
    """
    own = (recipe.policy.megatron_cfg.env_vars or {}) if uses_megatron(recipe.policy) else {}
    trainers = cuda_variables.of_train_ranks(recipe) | own
    variables = {"train": trainers, "generate": recipe.policy.generation.vllm_cfg.env_vars, "reward": trainers}
    options = recipe.cluster.sbatch_options
    parts = {
        name: replace(part, env_vars={**variables[name], **part.env_vars}, sbatch_options={**options, **part.sbatch_options})
        for name, part in config.components(recipe).items()
    }
    guests = ("generate",) if colocated(recipe) else tuple(parts)[1:] if recipe.cluster.share_nodes else ()
    return parts | {name: Guest(**vars(parts[name]), takes_turns=colocated(recipe)) for name in guests}
