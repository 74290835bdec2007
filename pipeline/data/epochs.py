"""Compute how many steps the records of a run make, and how many are left over at its end.

A step takes a whole batch: `policy.train_global_batch_size` items offline, `num_prompts_per_step` prompts online. A batch may
span two epochs, so records can be left over only at the end of the last epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import OnlineConfig, Recipe, bound, generates, section, training_sets
from pipeline.recipe.problems import Problem


@dataclass(frozen=True)
class Supply:
    """Holds the number of records of a whole run and of each step."""

    total: int | None  # records of all epochs and training sets; None: without an end
    source: str  # of the records, for a message
    per_step: int
    batch_key: str  # the key that sets per_step
    epochs_key: str

    @property
    def steps(self) -> int | None:
        """The number of full steps that the records make; None if the number of epochs is unlimited."""
        return None if self.total is None else self.total // self.per_step

    @property
    def left_over(self) -> int:
        """The number of records at the end of the last epoch that do not fill a step; 0 if epochs are unlimited."""
        return 0 if self.total is None else self.total % self.per_step

    def problem(self) -> Problem | None:
        """Return a problem if the records do not fill one step, else None."""
        if self.total is None or self.total >= self.per_step:
            return None
        smaller = f", or {self.batch_key}={self.total}" if self.total else ""
        message = (
            f"got {self.source}; expected at least {self.per_step}, the number for one step ({self.batch_key})."
            f" Try more records, a higher {self.epochs_key}{smaller}"
        )
        return Problem("data", "too-few-records", message)


def of_records(recipe: Recipe, records: int) -> Supply:
    """Return the supply of a run. records: the number of records of all training sets in one epoch."""
    epochs = bound(section(recipe).max_num_epochs)
    prefix = "data.datasets." if recipe.data.datasets else "data."
    shortened = [
        f"{prefix}{name}" for name, training_set in training_sets(recipe.data).items() if training_set.split_validation_size
    ]
    without = (
        f" (without the records that go to {', '.join(f'{name}.split_validation_size' for name in shortened)})"
        if shortened
        else ""
    )
    source = f"{records:,} records{without} and {recipe.algorithm}.max_num_epochs={epochs}"
    return _supply(recipe, None if epochs is None else records * epochs, source)


def of_ended_data(recipe: Recipe, records: int) -> Supply:
    """Return the supply of a run whose data have ended. records: how many records its data had in all epochs together."""
    return _supply(recipe, records, f"{records:,} records in all epochs")


def _supply(recipe: Recipe, total: int | None, source: str) -> Supply:
    name, config = recipe.algorithm, section(recipe)
    key, size = "policy.train_global_batch_size", recipe.policy.train_global_batch_size
    if generates(recipe):
        assert isinstance(config, OnlineConfig)
        key, size = f"{name}.num_prompts_per_step", config.num_prompts_per_step
    return Supply(total, source, size, key, f"{name}.max_num_epochs")
