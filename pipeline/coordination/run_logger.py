"""Write the metrics, rollouts and warnings of each step of a run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pipeline.checkpoints.background_worker import BackgroundWorker
from pipeline.config import Recipe
from pipeline.files.storage import RetryPolicy
from pipeline.files.stored_files import FileKey
from pipeline.monitor.learning import LearningMonitor
from pipeline.monitor.steps import StepMonitor
from pipeline.observe.metrics import Metrics
from pipeline.types import RolloutGroup, Sample


class RunLogger:
    """Logs the steps of a run, on rank 0. Rollouts are written in a thread."""

    metrics: Metrics  # from `open` on

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        retry: RetryPolicy,
        key: FileKey | None,
        tokenizer: PreTrainedTokenizerBase,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        monitor: StepMonitor | None = None,
        learning: LearningMonitor | None = None,
    ):
        """Write into the run's folder. phase: sets rank 0's phase, as `World.phase`.

        key: encrypts rollouts; None: they are written plain. monitor: None if resources are not monitored. learning: None if
        the samples of steps are not examined.
        """
        self._recipe, self._folder, self._retry, self._key = recipe, folder, retry, key
        self._tokenizer = tokenizer
        self._phase = phase
        self._monitor, self._learning = monitor, learning
        self._writer = BackgroundWorker()

    def open(self, after_step: int | None) -> Metrics:
        """Open the logs of a run. after_step: the restored step, after which all lines are removed; None: begin anew."""
        self.metrics = Metrics(self._folder, self._recipe.logger, after_step, self._retry, self._key)
        return self.metrics

    def note_learning(self, samples: Sequence[Sample], models: Sequence[str], estimates: bool) -> None:
        """Tell the monitors the samples of this step and the models that it updates.

        estimates: whether the train ranks compute the advantages.
        """
        if self._monitor:
            self._monitor.note_learning(samples, models)
        if self._learning:
            self._learning.note_learning(samples, estimates)

    def step_ended(self, step: int, values: dict[str, float], groups: list[RolloutGroup] | None) -> dict[str, float]:
        """Log a step and return its metrics, with the resource monitor's metrics added."""
        if groups is not None:
            self.write_rollouts(step, groups, "step")
        if self._monitor:
            values = values | self._monitor.step_ended(step, values, groups)
        if self._learning:
            self._learning.step_ended(step, values, groups)
        self.metrics.log(step, values)
        return values

    def write_rollouts(self, step: int, groups: list[RolloutGroup], kind: str) -> None:
        """Write rollouts in a thread, one step after another; all are written before the next checkpoint begins.

        Warn if most of them failed. kind: "step" or "val".
        """
        if self._learning:
            self._learning.episodes_ended(step, kind, groups)
        metrics = self.metrics
        if metrics.logs_rollouts:
            tokenizer = self._tokenizer_of_writer
            self.wait_for_rollouts()
            self._writer.start(lambda: metrics.log_rollouts(step, groups, tokenizer, kind))

    def wait_for_rollouts(self) -> None:
        """Wait until the thread has written all rollouts. Raises TimeoutError after cluster.timeouts.save."""
        with self._phase("write rollouts"):
            limit_s = self._recipe.cluster.timeouts.save
            if not self._writer.wait(limit_s):
                raise TimeoutError(
                    f"verb 'coordinate', phase 'write rollouts': not done after {limit_s:g} s (cluster.timeouts.save), on rank"
                    f" 0 (train), which writes into {self._folder}/rollouts"
                )

    @functools.cached_property
    def _tokenizer_of_writer(self) -> PreTrainedTokenizerBase:
        """A copy for the thread: a tokenizer used by two threads at once raises "Already borrowed"."""
        return copy.deepcopy(self._tokenizer)
