"""Keep what a tracker has received: tracking/NAME.json in the run folder.

The file is written before steps are sent, with their digests, and again when they have arrived. So a process that was killed in
between asks the tracker (`Tracker.open`), or sends them again where the tracker recognizes them.
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
        """Read a position; a new one if there is none."""
        return small_files.read(path, cls) or cls()

    @classmethod
    def at(cls, path: Path, place: list[str | None]) -> Position:
        """Return the position in a place: a new one if the file is of another place; its tracker then tells what that has."""
        known = cls.read(path)
        return known if known.place == place else cls(record=known.record, place=place)

    def write(self, path: Path) -> None:
        """Write the position durably. Raises OSError, with the old one still there."""
        if len(self.digests) > COMPARED:
            self.digests = dict(sorted(self.digests.items())[-COMPARED:])
        path.parent.mkdir(exist_ok=True)
        small_files.write(path, asdict(self))

    def held(self, last: int) -> None:
        """Take over from the tracker which step is its last: later ones are to be sent again."""
        self.last = last
        self.digests = {step: digest for step, digest in self.digests.items() if step <= last}

    def begin_record(self) -> None:
        """Begin another record of the run, which lacks everything."""
        self.record += 1
        self.last, self.digests, self.attached, self.state, self.ended = -1, {}, {}, {}, False


def digest(line: Mapping[str, Any]) -> str:
    """Return a digest of a line of metrics.jsonl: of the values that a replay of the step must repeat."""
    values = {key: value for key, value in line.items() if not key.startswith(NOT_REPRODUCIBLE)}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=6).hexdigest()


def run_id(run_dir: Path) -> str:
    """Return the run's id, 16 hexadecimal digits in tracking/id, and choose it at the first call.

    So a run that is made anew in the same folder has another one.
    """
    path = run_dir / FOLDER / "id"
    with _choosing_id:  # each tracker has a thread
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_durably(path, secrets.token_hex(8) + "\n")
        return path.read_text().strip()
