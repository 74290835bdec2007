"""Save a run on all train ranks, and restore it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from pipeline.checkpoints import verification
from pipeline.checkpoints.checkpoint import Checkpoint, Checkpoints
from pipeline.config import CheckpointingConfig
from pipeline.coordination.colocation import Colocation
from pipeline.coordination.run_logger import RunLogger
from pipeline.job.attempt import Attempt
from pipeline.job.deadline import Deadline
from pipeline.roles import TrainRole
from pipeline.rpc import RpcGroup

logger = logging.getLogger(__name__)


class RunSaver:
    """Writes the checkpoints of a run. It knows whether its last step is saved."""

    def __init__(
        self,
        config: CheckpointingConfig,
        checkpoints: Checkpoints,
        train: RpcGroup[TrainRole],
        colocation: Colocation,
        attempt: Attempt,
        deadline: Deadline,
        run_logger: RunLogger,
    ):
        self._config, self._checkpoints = config, checkpoints
        self._train, self._colocation = train, colocation
        self._attempt, self._deadline = attempt, deadline
        self._run_logger = run_logger
        self.rollouts: Callable[[], bytes] = bytes  # returns the rollout buffer's state for a checkpoint
        self._restored_rollouts = b""
        self._unsaved: Callable[[], None] | None = None  # saves the last step; None if it is saved
        self._unsettled: Callable[[dict[str, str]], None] | None = None  # completes a save, given the digests of its files
        self._save_s: float | None = None  # duration of the last save, until it is logged
        self._warned: set[str] = set()  # why checkpoints lacked a metric to rank by, each logged once

    def restore(self, latest: Checkpoint) -> None:
        """Verify a checkpoint and load it on the train ranks."""
        key = self._checkpoints.key
        verification.check_record(latest, self._config.verify, key)
        with self._colocation.training():
            self._train.call(TrainRole.restore, str(latest.folder)).result()
        self._restored_rollouts = latest.rollouts(key)

    def take_rollouts(self) -> bytes:
        """Return the rollout buffer's state from the restored checkpoint. Later calls return b""."""
        rollouts, self._restored_rollouts = self._restored_rollouts, b""
        return rollouts

    def take_duration(self) -> dict[str, float]:
        """Return the duration of the last save as a metric; {} if there is none or an earlier call has returned it."""
        save_s, self._save_s = self._save_s, None
        return {} if save_s is None else {"time/save": save_s}

    def step_ended(self, step: int, last: bool, state: dict[str, Any], values: dict[str, float]) -> None:
        """Save a step if that is due; otherwise keep its state for `finish`. last: whether it is the run's last step."""
        self.settle()
        self._unsaved = functools.partial(self.save, step, state, values)
        if self._config.enabled and (last or step % self._config.save_period == 0):
            self._unsaved()

    def finish(self) -> None:
        """Save the last step, if it is not saved, and wait until it is complete."""
        if self._unsaved and self._config.enabled:
            self._unsaved()
        self.settle(wait=True)

    def save(self, step: int, state: dict[str, Any], values: dict[str, float]) -> None:
        """Write a checkpoint on all ranks. With checkpointing.async_save, `settle` completes it later."""
        self.settle(wait=True)
        self._run_logger.wait_for_rollouts()
        start = time.perf_counter()
        self._attempt.check()
        partial = self._checkpoints.begin(step)
        with self._checkpoints.discarding(), self._colocation.training():
            self._checkpoints.keep_rollouts(partial, self.rollouts())
            self._train.call(TrainRole.save, str(partial)).result()
            exported: dict[str, str] = {}
            if self._config.save_consolidated:
                exported = self._train.call(TrainRole.export, str(partial / "hf")).result()[0]
        metric = self._ranking_metric(step, values)

        def commit(written: dict[str, str]) -> None:
            self._attempt.check()
            self._checkpoints.commit(partial, step, metric, state, written | exported)
            self._attempt.record_progress(step)
            self._save_s = time.perf_counter() - start
            self._deadline.record_save(self._save_s)

        self._unsaved, self._unsettled = None, commit
        self.settle(wait=not self._config.async_save)

    def settle(self, wait: bool = False) -> None:
        """Complete the checkpoint under way if all ranks have written it. wait: until they have."""
        if self._unsettled:
            with self._checkpoints.discarding():
                replies = self._train.call(TrainRole.written, wait).result()
            complete = [digests for digests in replies if digests is not None]
            if len(complete) == len(replies):
                self._unsettled({name: digest for digests in complete for name, digest in digests.items()})
                self._unsettled = None

    def _ranking_metric(self, step: int, values: dict[str, float]) -> float | None:
        """Return the metric that ranks the checkpoint of a step; None if its metrics lack it, with a warning the first time."""
        if not (name := self._config.metric_name):
            return None
        key = name.replace(":", "/", 1)
        validated = not key.startswith("val/") or any(metric.startswith("val/") for metric in values)
        note = "" if validated else ", which was not validated,"
        if key not in values and note not in self._warned:
            self._warned.add(note)
            logger.warning(
                "checkpointing.metric_name: got %s, but the metrics of step %d%s have no %s, so its checkpoint ranks last."
                " Its metrics: %s", name, step, note, key, ", ".join(sorted(values))
            )  # fmt: skip
        return values.get(key)
