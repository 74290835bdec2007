"""Decide whether a run goes on after a step, and say why it ends."""

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
"""Metric of the last step of a run that ends with its data: the records that fill no further step."""
DROPPED = "data/records_dropped"
"""Metric of the training records that the run has skipped so far, in all epochs, from the first such step on."""
NO_VARIATION = (
    "The other prompts are too easy or too hard for this policy. Try other data, more epochs or more answers to a prompt"
)


class NothingSaved(RuntimeError):
    """A run without checkpoints had to leave before its end."""


class RunProgress:
    """Decides when a run ends: at its last step, by an early stop, with its data, or before its time is up."""

    def __init__(self, recipe: Recipe, deadline: Deadline, attempt: Attempt, saver: RunSaver):
        self._recipe, self._deadline, self._attempt, self._saver = recipe, deadline, attempt, saver
        self._section = config.section(recipe)
        self.early_stop = EarlyStop(recipe.algorithm, self._section)
        self.left: str | None = None  # why the run left before its end, with everything saved
        self.stopped: str | None = None  # why the run is complete before its last step

    def goes_on(self, step: int) -> bool:
        """Return whether another step follows `step` steps, if the data suffice."""
        return step < self._section.max_num_steps and not self.early_stop.reason

    def stepped(self, values: dict[str, float]) -> None:
        """Note the metrics of a step: its duration tells whether there is time for another one."""
        self._deadline.stepped(values)

    def must_leave(self) -> bool:
        """Return, between two steps, whether to leave the run now. If so, the last step has been saved.

        Raises NothingSaved if it cannot be saved.
        """
        why = self._deadline.why_leave()
        if why is None:
            return False
        if not self._recipe.checkpointing.enabled:
            raise NothingSaved(f"{why}: the run ends without having saved anything, because checkpointing.enabled is false")
        self._saver.finish()
        self._attempt.ask_requeue(why)
        self.left = why
        logger.info("leaving: %s", why)
        return True

    def validated(self, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a validation, after the early stop has read them. Raises RecipeError if it misses its own."""
        self.early_stop.validated(values)
        return values

    def data_ended(self, step: int, left_over: int) -> dict[str, float]:
        """Log that the data have ended after a step, and return the metric of the records that no step uses.

        Raises RecipeError if there was no step at all.
        """
        supply = epochs.of_taken(self._recipe, left_over)
        if step == 0 and (problem := supply.problem()):
            raise RecipeError(problem)
        what = "the data end after step %d; the last %d records fill no step of %d and are not used"
        logger.info(what, step, left_over, supply.per_step)
        return {LEFT_OVER: float(left_over)} if left_over else {}

    def step_not_full(self, step: int, groups: int, wanted: int) -> None:
        """Log that the data have ended within a step, after `step` others. Raises RecipeError if there was no other."""
        what = f"the data end before step {step + 1} is full: only {groups} of {wanted} groups have rewards that vary"
        if step == 0:
            raise RecipeError(Problem("data", "too-few-records", f"{what}. {NO_VARIATION}"))
        logger.info("%s, and they are not used", what)

    def ended(self, step: int) -> None:
        """Note whether the run stops early, after `step` steps."""
        if not self.left and step < self._section.max_num_steps and self.early_stop.reason:
            self.stopped = self.early_stop.reason
            logger.info("the run stops early: %s", self.stopped)


def dropped_records(data: Stream | Mixture) -> dict[str, float]:
    """Return the metric of the records that the data have skipped up to their position; none if there are none."""
    return {DROPPED: float(data.dropped)} if data.dropped else {}


def validates(section: OnlineConfig | OfflineConfig, step: int, last: bool) -> bool:
    """Return whether to validate after a step. last: whether it is the run's last one."""
    begins = step >= section.val_start_at if isinstance(section, OnlineConfig) else True
    return (section.val_period > 0 and step % section.val_period == 0 and begins) or (section.val_at_end and last)
