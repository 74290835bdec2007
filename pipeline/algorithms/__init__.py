"""Registry of algorithms. Each algorithm is one file in this folder: its section of the recipe, its checks and its losses.

Start in `algorithm.py`, which documents the interface. Importing this package does not import torch. The file of an algorithm
must not import this module.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.algorithms.algorithm import Algorithm, OnlineAlgorithm

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


def _load(name: str, kind: str) -> type[Algorithm]:
    """Return the class of one of CLASSES. Raise TypeError for one that is not a complete algorithm."""
    module = import_module(f"pipeline.algorithms.{name}")
    found: Any = getattr(module, kind, None)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        expected = f"a subclass of Algorithm in pipeline/algorithms/{name}.py"
        raise TypeError(f"pipeline.algorithms.CLASSES['{name}']: got '{kind}'; expected {expected}")
    section = getattr(found, "Section", None)
    if not (isinstance(section, type) and is_dataclass(section)):
        raise TypeError(f"{module.__name__}.{kind}.Section: got {section}; expected a dataclass with the keys of {name}")
    for field in fields(section):
        if field.default is MISSING and field.default_factory is MISSING:
            key = f"{module.__name__}.{section.__name__}.{field.name}"
            raise TypeError(f"{key}: got no default; expected one. Try None, which {kind}.problems refuses")
    return found


ALGORITHMS: dict[str, type[Algorithm]] = {name: _load(name, kind) for name, kind in CLASSES.items()}
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
