"""Decide whether a run continues after a step, and log why it ends."""

from __future__ import annotations

import logging

from pipeline import config
from pipeline.algorithms.early_stop import EarlyStop
from pipeline.config import OfflineConfig, OnlineConfig, Problem, Recipe, RecipeError
from pipeline.coordination.run_saver import RunSaver
from pipeline.data import epochs
from pipeline.data.mixture import Mixture
from pipeline.data.stream import Stream
from pipeline.job.attempt import Attempt
from pipeline.job.deadline import Deadline

logger = logging.getLogger(__name__)

LEFT_OVER = "data/records_left_over"
"""Metric of the last step of a run that ends with its data: the number of records that fill no further step."""
DROPPED = "data/records_dropped"
"""Metric: the number of training records that the run has skipped so far, in all epochs; missing while it is 0."""
NO_VARIATION = (
    "The other prompts are too easy or too hard for this policy. Try other data, more epochs or more answers to a prompt"
)


class NothingSaved(RuntimeError):
    """Raised when a run must leave before its end and cannot save a checkpoint."""


class RunProgress:
    """Decides when a run ends: at its last step, by an early stop, when the data end, or before its time is up."""

    def __init__(self, recipe: Recipe, deadline: Deadline, attempt: Attempt, saver: RunSaver):
        self._recipe, self._deadline, self._attempt, self._saver = recipe, deadline, attempt, saver
        self._section = config.section(recipe)
        self.early_stop = EarlyStop(recipe.algorithm, self._section)
        self.left: str | None = None  # why the run left before its end, with everything saved
        self.stopped: str | None = None  # why the run is complete before its last step

    def goes_on(self, step: int) -> bool:
        """Return whether another step follows `step` steps, if the data suffice."""
        return step < self._section.max_num_steps and not self.early_stop.reason

    def note_step(self, values: dict[str, float]) -> None:
        """Note the metrics of a step: its duration tells whether there is time for another step."""
        self._deadline.record_step(values)

    def must_leave(self) -> bool:
        """Return, between two steps, whether to leave the run now. If so, the last step has been saved.

        Raises NothingSaved if it cannot be saved.
        """
        reason = self._deadline.why_leave()
        if reason is None:
            return False
        if not self._recipe.checkpointing.enabled:
            raise NothingSaved(f"{reason}: the run ends without having saved anything, because checkpointing.enabled is false")
        self._saver.finish()
        self._attempt.ask_requeue(reason)
        self.left = reason
        logger.info("leaving: %s", reason)
        return True

    def note_validation(self, values: dict[str, float]) -> dict[str, float]:
        """Pass a validation's metrics to the early stop, and return them. Raises RecipeError if its metric is missing."""
        self.early_stop.record_validation(values)
        return values

    def data_ended(self, step: int, left_over: int) -> dict[str, float]:
        """Log that the data have ended after a step, and return the metric of the records that no step uses.

        Raises RecipeError if there was no step at all.
        """
        supply = epochs.of_ended_data(self._recipe, left_over)
        if step == 0 and (problem := supply.problem()):
            raise RecipeError(problem)
        message = "the data end after step %d; the last %d records are too few for a step of %d and are not used"
        logger.info(message, step, left_over, supply.per_step)
        return {LEFT_OVER: float(left_over)} if left_over else {}

    def step_not_full(self, step: int, groups: int, per_step: int) -> None:
        """Log that the data have ended within a step, after `step` full steps. Raises RecipeError if no step was full."""
        message = f"the data end before step {step + 1} is full: only {groups} of {per_step} groups have rewards that vary"
        if step == 0:
            raise RecipeError(Problem("data", "too-few-records", f"{message}. {NO_VARIATION}"))
        logger.info("%s, and they are not used", message)

    def note_early_stop(self, step: int) -> None:
        """Note whether the run stops early, after `step` steps."""
        if not self.left and step < self._section.max_num_steps and self.early_stop.reason:
            self.stopped = self.early_stop.reason
            logger.info("the run stops early: %s", self.stopped)


def data_metrics(data: Stream | Mixture) -> dict[str, float]:
    """Return metrics of the data up to their position: the records skipped, if there are any, and those of a curriculum."""
    return data.metrics | ({DROPPED: float(data.dropped)} if data.dropped else {})


def validates(section: OnlineConfig | OfflineConfig, step: int, last: bool) -> bool:
    """Return whether to validate after a step. last: whether it is the run's last step."""
    return (section.val_period > 0 and step % section.val_period == 0) or (section.val_at_end and last)
