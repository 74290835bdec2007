"""Append to the audit log of a runs root: who submitted, cancelled, changed, exported or promoted what, and who was refused.

    audit.jsonl   one line of JSON for each action, never changed or removed
    audit.head    `begin NUMBER HASH` before each line is written and `end NUMBER HASH` after it

Each line has its number, time (UTC), user, host, action, subject, details, the SHA-256 of the line before it (`previous`) and
its own (`hash`). A line that is changed, dropped, inserted or moved breaks the chain; the head shows whether lines are missing
at the end. The `Receipt` of a submission is kept in the manifest of the run too, so a chain that somebody has computed anew is
detected. `launch/audit.py` verifies all of this.

Several users and processes append at once, also over NFS. A writer holds a lock of audit.jsonl, opens both files with O_APPEND,
and waits until they are on disk. If it is killed between `begin` and `end`, the next writer completes or removes its line.

Nothing here is secret or signed. Somebody who may write both files and every folder that keeps a receipt can write another
history. Both files work with the append-only attribute (`chattr +a`); then only root can do so.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from launch.runs import shared_files
from launch.runs.shared_files import Unusable
from pipeline.config import Problem, RecipeError
from pipeline.config.cluster import AUDIT_AUTO, AUDIT_NONE
from pipeline.files import small_files
from pipeline.files.storage import user_name
from pipeline.recipe import secrets

LOG, HEAD = "audit.jsonl", "audit.head"
KEY = "cluster.audit"
FIRST = "0" * 64
"""`previous` of the first line."""
NOWHERE = (-1, "")
"""Stands for (number, hash) of a last line that is not as it was written."""
WAIT_S = 60.0
"""How long a writer waits for the lock while other processes write."""
HEAD_BYTES = 1 << 14
"""Bytes at the end of audit.head that a writer reads."""
RUNS = "runs"
DEPTH = 4  # levels from a run folder to a run folder inside it: RUN/evaluations/SUITE/step_N
Action = Literal[
    "submit",  # before a job is submitted
    "submitted",  # with the job's id
    "cancel",
    "change",  # of a live run
    "stop_and_save",
    "export",
    "add",  # a version to a registry
    "promote",  # to a stage of a registry
    "refuse",  # an access
]
ACTIONS: tuple[str, ...] = get_args(Action)
requested_by: contextvars.ContextVar[str | None] = contextvars.ContextVar("requested_by", default=None)
"""The user of the REST service whose request is being carried out. Each line records this user in its details."""
VARIABLE = "HETSTEP_REQUESTED_BY"
"""The environment variable that holds the same user in the processes that a request starts."""


@dataclass(frozen=True)
class Receipt:
    """Holds a line's place in a log, and its hash. A kept receipt shows later whether the log is unchanged up to this line."""

    folder: str  # of the log, absolute
    number: int  # from 1
    hash: str


def record(action: Action, subject: str | Path, details: Mapping[str, Any] = {}, root: Path | None = None) -> Receipt | None:
    """Append a line, and return its receipt once it is on disk; None if the run's key `cluster.audit` is `none`.

    subject: what the action is about; for an action on a run, the run's folder. details: JSON values; secrets are redacted.
    root: the folder of the log; None: the folder that `folder_of(subject)` returns.

    Raises RecipeError with the key `cluster.audit` if the line cannot be written, or if the log does not end as its head says.
    """
    assert action in ACTIONS, f"{action}: add it to Action"
    folder = folder_of(Path(subject)) if root is None else root
    if folder is None:
        return None
    if name := _requested_by():
        details = {**details, "requested_by": name}
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "user": user_name(os.geteuid()),  # not of the variable USER, which anybody can set
        "host": socket.gethostname(),
        "action": action,
        "subject": str(subject),
        "details": secrets.redact_values(details),
    }
    try:
        with _lock_files(folder) as (log, head):
            return _append(folder, log, head, entry)
    except OSError as error:
        raise _refusal(folder, "unwritable", f"which cannot be written: {error.strerror}", "to free space there") from error


def environment() -> dict[str, str]:
    """Return the environment for a process that a service request starts, so that its log lines name the request's user."""
    return {**os.environ, **variables()}


def variables() -> dict[str, str]:
    """Return VARIABLE -> the user of the REST service whose request this process carries out; {} outside a request."""
    name = _requested_by()
    return {VARIABLE: name} if name else {}


def _requested_by() -> str | None:
    return requested_by.get() or os.environ.get(VARIABLE)


def folder_of(run_dir: Path) -> Path | None:
    """Return the folder of the audit log of a run, according to its recipe.yaml; None if `cluster.audit` is `none`."""
    try:
        value = small_files.read_yaml(run_dir / "recipe.yaml")["cluster"]["audit"]
    except (OSError, RecipeError, KeyError, TypeError):  # a run of an earlier version, or no run
        value = AUDIT_AUTO
    return folder_for(value, run_dir)


def folder_for(setting: str, run_dir: Path) -> Path | None:
    """Return the folder of the audit log for a run folder; None for `none`. setting: the value of `cluster.audit`.

    For `auto`, the candidates are the folders above the run that are named `runs`, the highest first, then the parent of the
    run folder. The first candidate that has a log, or that this user may write, is returned; without one, the run folder
    itself. A run inside another run's folder, such as an evaluation, uses the log of the outer run.
    """
    if setting == AUDIT_NONE:
        return None
    if setting != AUDIT_AUTO:
        return Path(setting).absolute()
    run_dir = run_dir.absolute()
    above = [folder for folder in list(run_dir.parents)[:DEPTH] if os.path.isfile(folder / "recipe.yaml")]
    top = above[-1] if above else run_dir
    named = [folder for folder in reversed(top.parents) if folder.name == RUNS]
    return next((folder for folder in (*named, top.parent) if os.path.exists(folder / LOG) or _can_write(folder)), top)


def _can_write(folder: Path) -> bool:
    """Return whether this user may write into a folder, or may create it."""
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return os.access(existing, os.W_OK | os.X_OK)


# ---- the form of lines --------------------------------------------------------------------------------------------------


def as_line(entry: Mapping[str, Any]) -> str:
    """Return the canonical JSON text of an entry: keys sorted, no blanks, ASCII, no line end."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def hash_of(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an entry, in hex. Its own key `hash` does not count."""
    return hashlib.sha256(as_line({key: value for key, value in entry.items() if key != "hash"}).encode()).hexdigest()


def seal(entry: Mapping[str, Any], number: int, previous: str) -> dict[str, Any]:
    """Return an entry with its number, the hash of the line before it (`previous`), and its own hash."""
    entry = {**entry, "number": number, "previous": previous}
    return {**entry, "hash": hash_of(entry)}


@dataclass(frozen=True)
class Head:
    """Holds the state of the log according to audit.head."""

    number: int = 0  # of the last line that is complete
    hash: str = FIRST
    begun: tuple[int, str] | None = None  # (number, hash) of the line that was being written, if its writer was killed

    @classmethod
    def parse(cls, text: str) -> Head:
        """Return the state that the text of audit.head describes. Ignores an incomplete last line. Raises ValueError."""
        head = cls()
        for line in text.split("\n")[:-1]:
            word, number, line_hash = line.split(" ")
            if word == "end":
                head = cls(int(number), line_hash)
            elif word == "begin":
                head = cls(head.number, head.hash, (int(number), line_hash))
            else:
                raise ValueError(f"got {word}; expected begin or end")
        return head


# ---- writing ------------------------------------------------------------------------------------------------------------


def _append(folder: Path, log: int, head: int, entry: dict[str, Any]) -> Receipt:
    """Append an entry to the log, and return its receipt. log, head: file descriptors of the two locked files."""
    number, previous = _recover(folder, log, head)
    entry = seal(entry, number + 1, previous)
    position = f"{entry['number']} {entry['hash']}\n"
    _write(head, f"begin {position}")
    _write(log, as_line(entry) + "\n")
    _write(head, f"end {position}")
    return Receipt(str(folder), entry["number"], entry["hash"])


def _write(descriptor: int, text: str) -> None:
    """Append a text, and return once it is on disk. After an error the file is as long as before."""
    before = os.fstat(descriptor).st_size
    unwritten = memoryview(text.encode())
    try:
        while unwritten:  # a full disk takes a part and fails only at the next write
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def _recover(folder: Path, log: int, head: int) -> tuple[int, str]:
    """Return (number, hash) of the log's last line. If a writer was killed, first complete or remove its line.

    Raises RecipeError if the log does not end as its head says.
    """
    _cut(head)
    size = os.fstat(head).st_size
    head_text = os.pread(head, HEAD_BYTES, max(0, size - HEAD_BYTES)).decode(errors="replace")
    head_text = head_text if size <= HEAD_BYTES else head_text.partition("\n")[2]
    last = _last_line(log)
    try:
        head_state = Head.parse(head_text)
        entry = json.loads(last) if last else {"number": 0, "hash": FIRST}
        is_whole = not last or (hash_of(entry) == entry["hash"] and as_line(entry) == last)
        at = (int(entry["number"]), str(entry["hash"])) if is_whole else NOWHERE
    except (ValueError, KeyError, TypeError, RecursionError):
        head_state, at = Head(), NOWHERE
    if head_state.begun is not None and at == head_state.begun:
        _cut(log)
        _write(head, f"end {at[0]} {at[1]}\n")
        return at
    if head_state.begun is not None and at == (head_state.number, head_state.hash):
        _cut(log)
    if at != (head_state.number, head_state.hash) or not _ends_whole(log):
        why = f"whose end differs from its record in {HEAD}"
        remedy = f"`python launch/audit.py verify root={folder}`; then move both files elsewhere, and a new log begins"
        raise _refusal(folder, "tampered", why, remedy)
    return at


def _ends_whole(descriptor: int) -> bool:
    return _end(descriptor) == os.fstat(descriptor).st_size


def _cut(descriptor: int) -> None:
    """Remove an incomplete last line, which a killed writer has left."""
    if not _ends_whole(descriptor):
        os.ftruncate(descriptor, _end(descriptor))


def _last_line(descriptor: int) -> str:
    """Return the last complete line, without its line end; "" if there is none."""
    if not (end := _end(descriptor)):
        return ""
    begin = _end(descriptor, end - 1)
    return os.pread(descriptor, end - 1 - begin, begin).decode(errors="replace")


def _end(descriptor: int, before: int | None = None) -> int:
    with open(descriptor, "rb", closefd=False) as file:
        return small_files.end_of_lines(file, before)


@contextlib.contextmanager
def _lock_files(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the file descriptors of the log and its head. Both are created if necessary, and locked against other writers."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    try:
        with shared_files.lock_file(folder / LOG, WAIT_S) as log:
            head = shared_files.open_shared(folder / HEAD)
            try:
                yield log, head
            finally:
                os.close(head)
    except Unusable as error:
        raise _refusal(folder, error.code, error.why, f"{error.remedy}, {KEY}=FOLDER with another one") from error


def _refusal(folder: Path, code: str, why: str, remedy: str) -> RecipeError:
    expected = "expected an audit log to append to, because every action is recorded before it is done"
    return RecipeError(Problem(KEY, code, f"got {folder / LOG}, {why}; {expected}. Try {remedy}, or {KEY}={AUDIT_NONE}"))


def as_record(receipt: Receipt | None) -> dict[str, Any] | None:
    """Return a receipt as JSON values for a manifest; None for None."""
    return None if receipt is None else asdict(receipt)
