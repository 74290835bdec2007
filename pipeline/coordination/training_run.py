"""Hold the parts of a run, with the operations that both training loops do at its start, after each step, and at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline import config
from pipeline.checkpoints.checkpoint import Checkpoints, version_problem
from pipeline.config import Recipe, RecipeError
from pipeline.coordination.colocation import Colocation
from pipeline.coordination.run_logger import RunLogger
from pipeline.coordination.run_progress import RunProgress, data_metrics, validates
from pipeline.coordination.run_saver import RunSaver
from pipeline.coordination.teacher_samples import TeacherSamples
from pipeline.data.mixture import Mixture
from pipeline.data.stream import Stream
from pipeline.job.attempt import Attempt
from pipeline.job.startup import Startup
from pipeline.observe.metrics import Metrics
from pipeline.observe.rank_timeline import Timeline
from pipeline.roles import TrainRole
from pipeline.rpc import RpcGroup
from pipeline.steering.live_changes import Steering
from pipeline.types import DataParallelRank, RolloutGroup

logger = logging.getLogger(__name__)

Validate = Callable[[], dict[str, float]]
"""A function that validates the current weights and returns the metrics."""


@dataclass
class TrainingRun:
    """The parts of a run, on rank 0."""

    recipe: Recipe
    train: RpcGroup[TrainRole]
    data_ranks: list[DataParallelRank]  # of the train ranks
    colocation: Colocation
    checkpoints: Checkpoints
    attempt: Attempt
    timeline: Timeline
    startup: Startup
    steering: Steering
    logger: RunLogger
    saver: RunSaver
    progress: RunProgress
    teacher_samples: TeacherSamples
    data: Stream | Mixture = field(init=False)  # from `restore` on
    validate: Validate | None = field(init=False)  # from `begin` on; None: nothing to validate on

    def restore(self, data: Stream | Mixture) -> tuple[int, Metrics]:
        """Load the last complete checkpoint, if there is one. Return (its step, the metrics up to this step)."""
        self.data = data
        self.checkpoints.clean()
        latest = self.checkpoints.latest()
        step, changes = (latest.step, latest.state.get("steer", [])) if latest else (0, [])
        self.steering.resume(step, changes, data)
        if latest is None:
            return 0, self.logger.open(None)
        if problem := version_problem(latest, self.recipe):
            raise RecipeError(problem)
        self.startup.enter("read the checkpoint")
        self.saver.restore(latest)
        data.load_state_dict(latest.state["stream"])
        self.progress.early_stop.load_state_dict(latest.state.get("early_stop", {}))
        logger.info("resumed from %s", latest.folder)
        return step, self.logger.open(step)

    def begin(self, step: int, validate: Validate | None) -> None:
        """Validate before the first step, if the recipe asks for it, and log it as step 0. step: the restored step."""
        self.validate = validate
        self.timeline.step_ended(step)
        if validate and step == 0 and config.section(self.recipe).val_at_start:
            self.startup.enter("validation")
            self.logger.metrics.log(0, validate() | self.logger.metrics.take_clocks())
        self.startup.enter("first step")

    def evaluate_alone(self, step: int, validate: Validate) -> int:
        """Validate once, log it under the step of these weights, and return that step. Nothing is trained or saved."""
        metrics = self.logger.metrics
        self.startup.enter("validation")
        metrics.take_clocks()  # a refit before it belongs to no step
        metrics.log_again(step, validate() | metrics.take_clocks())
        self.timeline.step_ended(step)
        self.startup.end()
        self.logger.wait_for_rollouts()
        metrics.close()
        return step

    def end_step(
        self,
        step: int,
        values: dict[str, float],
        tokens: int,
        position: dict[str, Any],
        left_over: int | None,
        groups: list[RolloutGroup] | None = None,
    ) -> None:
        """Log a step, and validate and save it if these are due.

        tokens: number of tokens of the step. position: the data's state after the step. left_over: number of records that are
        left if they fill no further step; None if the data continue.
        """
        section = config.section(self.recipe)
        unused = left_over if step < section.max_num_steps else None
        last = step >= section.max_num_steps or unused is not None
        if self.validate and validates(section, step, last):
            values |= self.validate()
        clocks = self.logger.metrics.take_clocks()
        values |= clocks | {"throughput/tokens_per_s": tokens / clocks["time/step"]} | self.timeline.step_ended(step)
        if unused is not None:
            values |= self.progress.data_ended(step, unused) | data_metrics(self.data)
        self.log_and_save(step, last or bool(self.progress.early_stop.reason), position, values, groups)

    def log_and_save(
        self,
        step: int,
        last: bool,
        position: dict[str, Any],
        values: dict[str, float],
        groups: list[RolloutGroup] | None = None,
    ) -> None:
        """Log a step, and save it when due. last: whether it is the run's last step."""
        values = values | self.saver.take_duration()  # of the previous checkpoint
        self.startup.end()
        self.attempt.check()
        values = self.logger.step_ended(step, values, groups)
        self.progress.note_step(values)
        stopping = self.progress.early_stop.state_dict()
        state = {"stream": position, "early_stop": stopping, "steer": self.steering.state_dict()}
        self.saver.step_ended(step, last, state, values)

    def finish(self, step: int) -> None:
        """Save the last step if it is not saved, because the data may end before a save is due. Then close the run's parts."""
        self.progress.note_early_stop(step)
        self.saver.finish()
        self.logger.wait_for_rollouts()
        if not self.progress.left:
            self.steering.run_ended(step)
        self.logger.metrics.close()
