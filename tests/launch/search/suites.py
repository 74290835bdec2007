"""A suite with a search over a recipe that passes every check."""

from pathlib import Path
from typing import Any

import yaml

from tests.launch.model import write_recipe

LR = "policy.optimizer.kwargs.lr"
KL = "loss_fn.reference_policy_kl_penalty"


def write_search(folder: Path, *, recipe: str | None = None, top: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a suite `some` with a search of a grid of two learning rates; `changes` are keys of the search, `top` others."""
    search = {
        "recipe": recipe or str(write_recipe(folder)),
        "overrides": {"grpo.max_num_steps": 4},
        "parameters": {LR: [1.0, 0.5]},
        "metric": "train/reward",
        "direction": "maximize",
        "sampler": "grid",
    }
    path = folder / "some.yaml"
    suite = {"folder": str(folder / "sweeps"), "search": {**search, **changes}, **(top or {})}
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return path
