"""The thread of a rank that takes samples, writes them to a bounded file, and keeps the latest for rank 0."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.monitor.readings import AVERAGED, COUNT, READINGS, SUM, TAKEN, Sample
from pipeline.monitor.stacks import StackWatch

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at the main thread's stack."""
MOST_BYTES = 4 << 20
"""Maximum bytes of a file of samples: about 14 hours at a sample every 5 s. A full file is kept as the older one of two."""
CLOSE_S = 2.0
"""Maximum seconds that the end of a run waits for a sampler whose disk hangs."""
Source = Callable[[], Sample]


class SampleFile:
    """A file of samples that a sampler's thread writes. Each line is a JSON object: `time` in unix seconds, and the readings.

    When the file has its largest size, it replaces NAME.before.jsonl, and a new file begins. While the disk fails, samples are
    lost.
    """

    def __init__(self, path: Path, about: dict[str, Any], flush_s: float, most_bytes: int = MOST_BYTES):
        """Prepare to write. about: the content of the first line, such as the rank and its node."""
        self._path, self._about, self._flush_s, self._most = path, about, flush_s, most_bytes
        self._lines: list[str] = []
        self._written = time.monotonic()
        self._size: int | None = None  # None: not begun
        self._failing = False

    def add(self, sample: Sample) -> None:
        """Add a sample. Every `flush_s` seconds, write the samples to the file."""
        line = {name: _short(value) for name, value in sample.items() if name in READINGS}
        self._lines.append(json.dumps({"time": round(time.time(), 3), **line}) + "\n")
        if time.monotonic() - self._written >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Write the lines that are not on disk."""
        text, self._lines, self._written = "".join(self._lines), [], time.monotonic()
        try:
            self._append(text)
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                logger.warning("samples of resources cannot be written to %s (%s); the run goes on", self._path, error)

    def _append(self, text: str) -> None:
        if self._size is None or self._size + len(text) > self._most:
            self._path.parent.mkdir(exist_ok=True)
            if self._path.exists():
                os.replace(self._path, self._path.with_suffix(".before.jsonl"))
            text = json.dumps(self._about) + "\n" + text
            self._size = 0
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(text)
        self._size += len(text)


def _short(value: float) -> float:
    return float(f"{value:.6g}") if abs(value) < 1e6 else round(value, 1)


class Sampler:
    """Samples until `stop`. Reading `latest` and `encoded` never blocks."""

    def __init__(
        self, sources: Sequence[Source], period_s: float, file: SampleFile | None = None, watch: StackWatch | None = None
    ):
        """Prepare to sample. sources: functions that return readings. watch: looks at the main thread between samples."""
        self._sources = list(sources)
        self._period_s = period_s
        self._file = file
        self._watch = watch
        self._sums: dict[str, float] = {}
        self._count = 0
        self._failed: set[object] = set()  # parts whose error is logged
        self.latest: Sample = {}
        self.encoded = b""  # the same, for a heartbeat
        self.on_sample: Callable[[], None] = lambda: None  # called after each sample, and at the end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def add(self, source: Source) -> None:
        """Read another source from the next sample on."""
        self._sources.append(source)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which writes the rest, within CLOSE_S."""
        self._stopped.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self.sample()
            while not self._wait():
                self.sample()
            self._look()
            if self._file:
                self._file.flush()
        except Exception:  # the run is worth more than its samples
            logger.exception("the resource monitor of this rank ends; the run goes on without it")

    def _wait(self) -> bool:
        """Watch the main thread until the next sample is due; return whether the sampler is stopped."""
        looked = time.monotonic()
        ends = looked + self._period_s
        while (remaining := ends - time.monotonic()) > 0:
            if self._stopped.wait(min(LOOK_S, remaining) if self._watch else remaining):
                return True
            if self._watch:
                now = time.monotonic()
                self._watch.look(now - looked)
                looked = now
        return False

    def sample(self) -> None:
        """Take one sample. The readings of a source that raises are left out; its first error is logged."""
        readings: Sample = {}
        for number, source in enumerate(self._sources):
            try:
                readings |= source()
            except Exception as error:
                self._tell_once(number, "a part of this rank's resources cannot be read", error)
        if self._watch:
            readings["collective"] = self._watch.seconds
        for name in AVERAGED & readings.keys():
            self._sums[SUM + name] = self._sums.get(SUM + name, 0.0) + readings[name]
        self._count += 1
        readings |= {**self._sums, COUNT: float(self._count), TAKEN: time.monotonic()}
        self.encoded, self.latest = msgspec.msgpack.encode(readings), readings
        self._look()
        if self._file:
            self._file.add(readings)

    def _look(self) -> None:
        try:
            self.on_sample()
        except Exception as error:
            self._tell_once("warnings", "some warnings about resources are lost", error)

    def _tell_once(self, part: object, message: str, error: Exception) -> None:
        if part not in self._failed:
            self._failed.add(part)
            logger.warning("%s (%s: %s)", message, type(error).__name__, error)
