"""Registry of algorithms. Each algorithm is one file in this folder: its section of the recipe, its checks and its losses.

Start in `algorithm.py`, which documents the interface. Importing this package does not import torch. The file of an algorithm
must not import this module.

A recipe may also name a class elsewhere by its dotted path, or an installed one by its entry point in the group GROUP. It is
added to ALGORITHMS when the recipe is read (`pipeline/config/user_algorithm.py`), under the name of its section.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from pipeline.algorithms.algorithm import Algorithm, OnlineAlgorithm
from pipeline.algorithms.rewarded import RewardedAlgorithm
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.seams.registered_class import load

if TYPE_CHECKING:
    from pipeline.config import Recipe

CLASSES = {  # by the name of the file, which is also the recipe's section and the value of `algorithm`
    "grpo": "GRPO",
    "ppo": "PPO",
    "distillation": "Distillation",
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "rm": "RM",
    "evaluate": "Evaluate",
}
GROUP = "hetstep.algorithms"
CUSTOM_LOSS = ("loss_fn.custom", "loss_fn.custom_kwargs")
"""Keys of the policy's loss that all algorithms read that train."""


class Names(Sequence[str]):
    """The names of the algorithms that a condition holds for, in the order of ALGORITHMS."""

    def __init__(self, holds: Callable[[type[Algorithm]], bool]) -> None:
        self._holds = holds

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return [name for name, kind in ALGORITHMS.items() if self._holds(kind)][index]

    def __len__(self) -> int:
        return len(self[:])


ALGORITHMS: dict[str, type[Algorithm]] = {name: load(__name__, name, kind, Algorithm) for name, kind in CLASSES.items()}
ONLINE = Names(lambda kind: issubclass(kind, OnlineAlgorithm))  # sample from the policy
OFFLINE = Names(lambda kind: not issubclass(kind, OnlineAlgorithm))  # learn from a data set
PAIRED = Names(lambda kind: kind.paired)  # learn from pairs of answers
LABELED = Names(lambda kind: kind.labeled)  # learn from answers that are labeled good or bad


def build(recipe: Recipe) -> Algorithm:
    """Return the algorithm that a recipe selects. Raises RecipeError if a user's class cannot be built."""
    kind = ALGORITHMS[recipe.algorithm]
    if recipe.algorithm in CLASSES:
        return kind(recipe)
    try:
        return kind(recipe)
    except RecipeError:
        raise
    except Exception as error:
        message = f"{recipe.algorithm_class}: the class raised {type(error).__name__}: {error}"
        raise RecipeError(Problem("algorithm", "unsupported", message)) from error


def read_by(key: str) -> tuple[str, ...]:
    """Return the algorithms that read a dotted key of the recipe.

    The longest entry of `Algorithm.reads` that is a prefix of the key decides: `loss_fn.kl_type` before `loss_fn`. All
    algorithms read a key that none of them claims.
    """
    claims = [(name, claim) for name, kind in ALGORITHMS.items() for claim in (name, *kind.reads)]
    claims += [(name, claim) for name, kind in ALGORITHMS.items() if kind.trains_model for claim in CUSTOM_LOSS]
    claims = [(name, claim) for name, claim in claims if f"{key}.".startswith(f"{claim}.")]
    longest = max((len(claim) for _, claim in claims), default=0)
    return tuple(name for name, claim in claims if len(claim) == longest) or tuple(ALGORITHMS)


def problem(kind: Any) -> str | None:
    """Return why an object is not an algorithm's class, or None if it is. Does not build it."""
    if not isinstance(kind, type):
        return f"got a {type(kind).__name__}; expected a class that derives from {Algorithm.__module__}.Algorithm"
    if not issubclass(kind, Algorithm):
        return f"the class does not derive from Algorithm; expected one of the bases in {Algorithm.__module__}"
    for name, abstract, parameters in (
        ("loss", Algorithm.loss, "self, outputs, batch, counts"),
        ("compute_advantages", OnlineAlgorithm.compute_advantages, "self, groups"),
        ("advantages", RewardedAlgorithm.advantages, "self, group, rewards"),
    ):
        method = getattr(kind, name, None)
        if method is None or not kind.trains_model:
            continue
        if method is abstract:
            return f"the class has no {name}; expected {name}({parameters})"
        try:
            inspect.signature(method).bind(*parameters.split(","))
        except TypeError as error:
            return f"got {name}{inspect.signature(method)}; expected ({parameters}): {error}"
    return None
