"""Keep a record of the data that a tracker has received, in tracking/NAME.json in the run folder.

The file is written with the steps' digests before they are sent, and again when they have arrived. If a process is killed in
between, the next one asks the tracker for its last step (`Tracker.open`), or sends the steps again if the tracker recognizes
them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.files import small_files
from pipeline.files.storage import write_durably
from pipeline.observe.metrics import NOT_REPRODUCIBLE

FOLDER = "tracking"
COMPARED = 20_000
"""Latest steps whose digests are kept. A run never goes back further than to its oldest checkpoint."""
_choosing_id = threading.Lock()


@dataclass
class Position:
    """The steps and attachments of a run that a tracker has."""

    record: int = 1  # the run's first record in the tracker, or a later one
    last: int = -1  # last step that arrived
    digests: dict[int, str] = field(default_factory=dict)  # of steps that were sent, those after `last` too
    attached: dict[str, str] = field(default_factory=dict)  # samples, files and scores -> which version was sent
    state: dict[str, Any] = field(default_factory=dict)  # the tracker's own
    ended: bool = False  # whether the record is closed as that of a complete run
    place: list[str | None] | None = None  # the server and project that have the record; None: it is new

    @classmethod
    def read(cls, path: Path) -> Position:
        """Read the position from a file. Return a new one if there is no file."""
        return small_files.read(path, cls) or cls()

    @classmethod
    def at(cls, path: Path, place: list[str | None]) -> Position:
        """Read the position from a file. Return a new one if the file's position is of another place.

        place: the tracker's server and project. The tracker at a new place reports which steps it has.
        """
        known = cls.read(path)
        return known if known.place == place else cls(record=known.record, place=place)

    def write(self, path: Path) -> None:
        """Write the position durably. Raises OSError; the file then has the old position."""
        if len(self.digests) > COMPARED:
            self.digests = dict(sorted(self.digests.items())[-COMPARED:])
        path.parent.mkdir(exist_ok=True)
        small_files.write(path, asdict(self))

    def held(self, last: int) -> None:
        """Set `last` to the last step that the tracker reports, so that later steps are sent again."""
        self.last = last
        self.digests = {step: digest for step, digest in self.digests.items() if step <= last}

    def begin_record(self) -> None:
        """Begin another record of the run, which has no data yet."""
        self.record += 1
        self.last, self.digests, self.attached, self.state, self.ended = -1, {}, {}, {}, False


def digest(line: Mapping[str, Any]) -> str:
    """Return a digest of those values in a line of metrics.jsonl that a replay of the step must repeat."""
    values = {key: value for key, value in line.items() if not key.startswith(NOT_REPRODUCIBLE)}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=6).hexdigest()


def run_id(run_dir: Path) -> str:
    """Return the run's id for trackers, 16 hexadecimal digits. The first call chooses it and writes it to tracking/id.

    So a run that is made anew in the same folder has another id.
    """
    path = run_dir / FOLDER / "id"
    with _choosing_id:  # each tracker has a thread
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_durably(path, secrets.token_hex(8) + "\n")
        return path.read_text().strip()
