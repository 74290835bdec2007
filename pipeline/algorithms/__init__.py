"""Registry of algorithms. Each algorithm is one file in this folder: its section of the recipe, its checks and its losses.

Start in `algorithm.py`, which documents the interface. Importing this package does not import torch. The file of an algorithm
must not import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.algorithms.algorithm import Algorithm, OnlineAlgorithm
from pipeline.seams.registered_class import load

if TYPE_CHECKING:
    from pipeline.config import Recipe

CLASSES = {  # by the name of the file, which is also the recipe's section and the value of `algorithm`
    "grpo": "GRPO",
    "ppo": "PPO",
    "distillation": "Distillation",
    "sft": "SFT",
    "dpo": "DPO",
    "rm": "RM",
    "evaluate": "Evaluate",
}


ALGORITHMS: dict[str, type[Algorithm]] = {name: load(__name__, name, kind, Algorithm) for name, kind in CLASSES.items()}
ONLINE = tuple(name for name, kind in ALGORITHMS.items() if issubclass(kind, OnlineAlgorithm))  # sample from the policy
OFFLINE = tuple(name for name in ALGORITHMS if name not in ONLINE)  # learn from a data set
PAIRED = tuple(name for name, kind in ALGORITHMS.items() if kind.paired)  # learn from pairs of answers


def build(recipe: Recipe) -> Algorithm:
    """Return the algorithm that a recipe selects."""
    return ALGORITHMS[recipe.algorithm](recipe)


def read_by(key: str) -> tuple[str, ...]:
    """Return the algorithms that read a dotted key of the recipe.

    The longest entry of `Algorithm.reads` that is a prefix of the key decides: `loss_fn.kl_type` before `loss_fn`. All
    algorithms read a key that none of them claims.
    """
    claims = [(name, claim) for name, kind in ALGORITHMS.items() for claim in (name, *kind.reads)]
    claims = [(name, claim) for name, claim in claims if f"{key}.".startswith(f"{claim}.")]
    longest = max((len(claim) for _, claim in claims), default=0)
    return tuple(name for name, claim in claims if len(claim) == longest) or tuple(ALGORITHMS)
