"""Decide when to leave a run with everything saved: before its time is up, or when a signal asks for it.

Rank 0 checks between two steps. The time is up at the end of the allocation, or earlier at
checkpointing.checkpoint_must_save_by. Another step begins only if a step and a save fit into the remaining time, each as
long as the longest in this run so far: a step with its validation, and a save from its beginning until the checkpoint is
complete. Earlier attempts have recorded these in metrics.jsonl as time/step, time/validation and time/save.

If a step takes longer than every earlier step, it may not fit: then the executor ends the ranks, and the step is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pipeline.config import CheckpointingConfig
from pipeline.job import signals
from pipeline.observe import metrics
from pipeline.recipe.values import seconds

SLACK = 1.1
"""Factor on the longest step and save so far, because the next ones may take longer."""
MARGIN_S = 60.0
"""Time reserved to end the ranks, and for coarse clocks; at most MARGIN_SHARE of the allocation."""
MARGIN_SHARE = 0.05
UNKNOWN_SAVE_SHARE = 0.1
"""Share of the allocation that a save is assumed to take until a save was measured."""


class Deadline:
    """Decides when a run must leave, by the end of its time and the longest step and save so far."""

    def __init__(
        self,
        started: float,
        ends: Mapping[str, float],
        history: Iterable[Mapping[str, float]],
        received: Callable[[], list[str]] = signals.received_names,
        now: Callable[[], float] = time.time,
    ):
        """Set the deadline to the earliest of `ends`.

        started: unix seconds at which the attempt started. ends: name of a period of time -> unix seconds at which it ends.
        history: the lines of metrics.jsonl that earlier attempts wrote. received: returns the names of the received signals.
        now: returns unix seconds.
        """
        self._started = started
        self._period, self._end = min(ends.items(), key=lambda end: end[1]) if ends else ("", None)
        self._received = received
        self._now = now
        self._step_s = 0.0
        self._save_s: float | None = None
        for line in history:
            self._measure(line)
        self._has_stepped = False

    @classmethod
    def of_attempt(cls, config: CheckpointingConfig, run_dir: Path, attempt: Path) -> Deadline:
        """Return the deadline of an attempt, from its start, the end of its allocation and the run's metrics."""
        started = float((attempt / "started").read_text())
        ends = {}
        if end := os.environ["HETSTEP_END_TIME"]:
            ends["the allocation"] = float(end)
        if config.checkpoint_must_save_by is not None:
            ends["checkpointing.checkpoint_must_save_by"] = started + seconds(config.checkpoint_must_save_by)
        return cls(started, ends, metrics.read(run_dir / "metrics.jsonl"))

    def record_step(self, line: Mapping[str, float]) -> None:
        """Record the metrics of a step that has ended."""
        self._measure(line)
        self._has_stepped = True

    def record_save(self, seconds: float) -> None:
        """Record how many seconds a save took until its checkpoint was complete."""
        self._measure({"time/save": seconds})

    def _measure(self, line: Mapping[str, float]) -> None:
        if "time/step" in line:
            self._step_s = max(self._step_s, line["time/step"] + line.get("time/validation", 0.0))
        if "time/save" in line:
            self._save_s = max(self._save_s or 0.0, line["time/save"])

    def why_leave(self) -> str | None:
        """Return why the run must not begin another step; None if there is time for it and no signal has come.

        Each attempt makes one step, however little time is left: a past measurement may have been an exception, and an attempt
        without a step makes no progress.
        """
        if names := self._received():
            return f"{' and '.join(names)} came"
        if self._end is None or not self._has_stepped:
            return None
        save_s = UNKNOWN_SAVE_SHARE * (self._end - self._started) if self._save_s is None else self._save_s
        if not (end_text := self._ending(SLACK * (self._step_s + save_s))):
            return None
        return f"{end_text}: no time for another step (longest so far: {self._step_s:.1f} s) and a save ({save_s:.1f} s)"

    def why_end(self, progressed: bool) -> str | None:
        """Return why to end work that can end at any moment; None if there is time and no signal came.

        progressed: whether this attempt has saved any progress. Until then it continues, however little time is left.
        """
        if names := self._received():
            return f"{' and '.join(names)} came"
        return self._ending(0.0) if progressed else None

    def _ending(self, needed_s: float) -> str | None:
        """Return a text that says how near the end is if `needed_s` seconds do not fit before it; None if they fit."""
        if self._end is None:
            return None
        left_s, margin_s = self._end - self._now(), min(MARGIN_S, MARGIN_SHARE * (self._end - self._started))
        if left_s >= needed_s + margin_s:
            return None
        return f"{self._period} ends in {left_s:.0f} s" if left_s > 0 else f"{self._period} is over"
