"""The registry of algorithms. Each is a file of this folder, with its section of the recipe, its checks and its losses.

Importing it needs no torch: pipeline/algorithms/base.py says how. An algorithm's file never imports it.
"""

from importlib import import_module
from typing import Any

from pipeline.algorithms.base import Algorithm, OnlineAlgorithm

CLASSES = {  # by the file's name, which is the recipe's section and what `algorithm` says
    "grpo": "GRPO",
    "ppo": "PPO",
    "distillation": "Distillation",
    "sft": "SFT",
    "dpo": "DPO",
    "rm": "RM",
}
ALGORITHMS: dict[str, type[Algorithm]] = {
    name: getattr(import_module(f"pipeline.algorithms.{name}"), kind) for name, kind in CLASSES.items()
}
ONLINE = tuple(name for name, kind in ALGORITHMS.items() if issubclass(kind, OnlineAlgorithm))  # these sample
OFFLINE = tuple(name for name in ALGORITHMS if name not in ONLINE)  # these learn from a data set
PAIRED = tuple(name for name, kind in ALGORITHMS.items() if kind.paired)


def build(recipe: Any) -> Algorithm:
    """Return the algorithm of a `pipeline.config.Recipe`."""
    return ALGORITHMS[recipe.algorithm](recipe)


def read_by(key: str) -> tuple[str, ...]:
    """Return the algorithms that read a dotted key of the recipe: all, unless it belongs to some.

    The longest entry of their `reads` that begins the key decides: of `loss_fn` and `loss_fn.kl_type` the latter.
    """
    claims = [(name, claim) for name, kind in ALGORITHMS.items() for claim in (name, *kind.reads)]
    claims = [(name, claim) for name, claim in claims if f"{key}.".startswith(f"{claim}.")]
    longest = max((len(claim) for _, claim in claims), default=0)
    return tuple(name for name, claim in claims if len(claim) == longest) or tuple(ALGORITHMS)
