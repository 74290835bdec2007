"""Send one tracker the data of a run folder that it lacks. It gets each step of metrics.jsonl once, as soon as it is written.

A resumed run cuts metrics.jsonl back to its checkpoint and runs later steps again. Trackers cannot remove steps. They need not,
since a replayed step has the same values: it is compared by digest with the step that was sent, and skipped. The times and
resources that a tracker shows for a replayed step are those of its first run. If a step differs, because the recipe, the code
or the machine changed, the run begins another record in the tracker, which gets all steps of metrics.jsonl. The log says so.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import Recipe, environment_names
from pipeline.files import small_files
from pipeline.observe import metrics
from pipeline.recipe import secrets
from pipeline.trackers import TRACKERS
from pipeline.trackers.tracker import LoggedStep, TrackedRun, Tracker
from pipeline.tracking.attachments import Attachment, attachments
from pipeline.tracking.position import FOLDER, Position, digest, run_id

logger = logging.getLogger(__name__)

AT_ONCE = 200
"""Maximum number of steps that are read and sent together."""


def enabled_trackers(recipe: Recipe) -> list[str]:
    """Return the names of the trackers that a recipe asks for."""
    return [name for name in TRACKERS if getattr(recipe.logger, f"{name}_enabled")]


class Feed:
    """Sends one tracker the data of one run folder. Only one thread of one process may use it at a time."""

    def __init__(self, name: str, recipe: Recipe, run_dir: Path):
        self.name = name
        self._kind = TRACKERS[name]
        self._recipe = recipe
        self._run_dir = run_dir
        self._path = run_dir / FOLDER / f"{name}.json"
        self._position = Position.at(self._path, [getattr(getattr(recipe.logger, name), key) for key in self._kind.place])
        self._reader = metrics.Reader(run_dir / "metrics.jsonl", replays=True)
        self._tracker: Tracker | None = None
        self._refused: dict[str, str] = {}  # attachments that could not be sent -> their version

    @property
    def title(self) -> str:
        """Name of the tracker, for people."""
        return self._kind.title

    @property
    def last(self) -> int:
        """The last step that has arrived; -1 if none has."""
        return self._position.last

    def look(self, ended: bool) -> None:
        """Send the new steps and attachments. ended: True if the run writes no more.

        Raises the tracker's errors. The caller then calls `reset`, and `look` again later.
        """
        if self._position.ended and not self._is_behind(ended):
            return
        tracker = self._tracker or self._open()
        while lines := self._lines():
            if (step := self._differing(lines)) is not None:
                tracker = self._begin_record(step)
            else:
                self._send(tracker, [line for line in lines if line["step"] > self.last])
        for attachment in self._missing(ended):
            self._attach(tracker, attachment)

    def _lines(self) -> list[dict[str, Any]]:
        """Return the next lines of metrics.jsonl, AT_ONCE at most; [] if there are none."""
        return list(itertools.islice(self._reader.lines(), AT_ONCE))

    def _is_behind(self, ended: bool) -> bool:
        """Return whether a closed record lacks steps or attachments. Goes on reading metrics.jsonl at its current position."""
        lines = self._lines()
        new = any(line["step"] > self.last for line in lines) or self._differing(lines) is not None
        return new or any(True for _ in self._missing(ended))

    def _open(self) -> Tracker:
        position, first = self._position, run_id(self._run_dir)
        position.write(self._path)  # raises on a full disk, where W&B's start would hang
        record_id = first if position.record == 1 else f"{first}-{position.record}"
        plain = environment_names.named(self._run_dir, small_files.read_yaml(self._run_dir / "recipe.yaml"))
        run = TrackedRun(record_id, first, self._recipe.name, self._run_dir.resolve(), secrets.redact_values(plain))
        tracker = self._kind(getattr(self._recipe.logger, self.name), run, position.state)
        self._tracker = tracker  # before it opens: `reset` closes what has half begun
        if (held := tracker.open()) is not None:
            position.held(held)
        position.ended = False
        position.write(self._path)
        self._reader.rewind()
        return tracker

    def _differing(self, lines: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the first step that was sent with other values, or None."""
        for line in lines:
            sent = self._position.digests.get(line["step"]) if line["step"] <= self.last else None
            if sent is not None and sent != digest(line):
                return line["step"]
        return None

    def _begin_record(self, step: int) -> Tracker:
        logger.warning(
            "%s: step %d was run again, and its values differ from the sent ones; a new record of the run gets all steps",
            self.title, step,
        )  # fmt: skip
        self.close(ended=False)
        self._position.begin_record()
        self._position.write(self._path)
        return self._open()

    def _send(self, tracker: Tracker, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        self._position.digests |= {line["step"]: digest(line) for line in lines}
        self._position.write(self._path)
        tracker.log([_make_step(line) for line in lines])
        self._position.last = lines[-1]["step"]
        self._position.write(self._path)

    def _missing(self, ended: bool) -> list[Attachment]:
        candidates = attachments(self._run_dir, self._recipe.checkpointing.save_period, self.last if ended else self.last - 1)
        known = self._position.attached | self._refused
        return [attachment for attachment in candidates if known.get(attachment.name) != attachment.version]

    def _attach(self, tracker: Tracker, attachment: Attachment) -> None:
        """Send an attachment. A failure is only logged, since steps matter more."""
        try:
            attachment.send(tracker)
        except Exception as error:
            logger.warning("%s: %s could not be sent (%s)", self.title, attachment.name, brief(error))
            self._refused[attachment.name] = attachment.version
            return
        self._position.attached[attachment.name] = attachment.version
        self._position.write(self._path)

    def reset(self) -> None:
        """Close the tracker after an error. `look` opens it anew."""
        self._refused.clear()
        try:
            self.close(ended=False)
        except Exception as error:
            logger.info("%s: closing it failed (%s)", self.title, brief(error))

    def close(self, ended: bool) -> None:
        """Close the record. ended: True if the run is complete and the tracker has all its data."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        tracker.close(ended)
        if ended:
            self._position.ended = True
            self._position.write(self._path)


def _make_step(line: Mapping[str, Any]) -> LoggedStep:
    values = {key: value for key, value in line.items() if key not in ("step", "time") and value is not None}
    return LoggedStep(line["step"], line["time"], values)


def brief(error: BaseException) -> str:
    """Return an error's type and the first 300 characters of its text, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
