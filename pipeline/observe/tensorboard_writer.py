"""Write TensorBoard events from the lines of metrics.jsonl, and catch up on lines that could not be written before.

Each start of the run has one events file, to which each step appends. SummaryWriter is not used, because it writes from its own
thread and loses events if the disk is full. Left out: everything except scalars.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  # generated without stubs
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # generated without stubs
from tensorboard.summary.writer.record_writer import RecordWriter

from pipeline.files.storage import append


class TensorBoardWriter:
    """Appends scalar events to a folder of TensorBoard."""

    def __init__(self, folder: Path, last: int):
        """Continue a folder after step `last` (-1: from the start). TensorBoard hides its events of later steps."""
        self._folder = folder
        self._shown = _last_step(folder, last)
        self._path: Path | None = None
        self._size = 0

    def show_from(self, step: int) -> None:
        """Let the next `show` write values of this step again, even if the step has events already."""
        self._shown = min(self._shown, step - 1)

    def show(self, lines: list[dict[str, Any]]) -> None:
        """Write the lines of steps that have no events yet, in order. Raises OSError; the caller may then repeat the call."""
        path = self._path or self._begin()
        events = [
            Event(
                wall_time=line["time"],
                step=line["step"],
                summary=Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in _scalars(line)]),
            )
            for line in lines
            if line["step"] > self._shown
        ]
        if events:
            self._size = append(path, self._size, _records(events), durable=False)
            self._shown = events[-1].step

    def _begin(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        purge = Event(wall_time=time.time(), step=self._shown + 1, session_log=SessionLog(status=SessionLog.START))
        head = _records([Event(wall_time=time.time(), file_version="brain.Event:2"), purge])
        self._size = append(self._folder / name, 0, head, durable=False)
        self._path = self._folder / name
        return self._path


def write_events(folder: Path, step: int, values: dict[str, float]) -> Path:
    """Write the values of one step to a new file in a folder. Other processes may write to the folder too. Raises OSError.

    The folder must not be one of a `TensorBoardWriter`: TensorBoard reads only the newest file of a folder while it grows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    event = Event(
        wall_time=time.time(),
        step=step,
        summary=Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in values.items()]),
    )
    path = folder / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    append(path, 0, _records([Event(wall_time=time.time(), file_version="brain.Event:2"), event]), durable=False)
    return path


def _scalars(line: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the (key, value) pairs of a line, without null, which stands for NaN and infinity."""
    return [(key, value) for key, value in line.items() if key not in ("step", "time") and value is not None]


def _records(events: list[Event]) -> bytes:
    """Return events as TFRecords: for each event its length, the length's checksum, the event, and the event's checksum."""
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()


def _last_step(folder: Path, last: int) -> int:
    """Return the last step up to `last` that has events; -1 if none. Of a truncated file, the whole records count."""
    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        events = [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]
        if steps := [event.step for event in events if event.HasField("summary")]:
            return min(steps[-1], last)
        begins = [event.step for event in events if event.HasField("session_log")]
        last = min([last, *(step - 1 for step in begins)])
    return -1
