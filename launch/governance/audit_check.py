"""Verify an audit log: its chain of hashes, its head, and the receipts of its lines in runs, exports and registries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from launch.governance.audit_log import FIRST, HEAD, LOG, Head, Receipt, as_line, hash_of
from launch.runs.run_folder import DEEPEST, find
from launch.terminal.units import plural
from pipeline.config import Problem, RecipeError
from pipeline.files import small_files
from pipeline.lineage import input_records
from pipeline.recipe import user_files

TEXTS = ("action", "hash", "host", "previous", "subject", "time", "user")
FIELDS = {**dict.fromkeys(TEXTS, str), "number": int, "details": dict}
"""Key of an entry -> the type of its value."""
RECEIPT = {"folder": str, "number": int, "hash": str}
TRIES = 100
"""How often the log and its head are read before a check gives up on reading both between two writes."""
MANIFEST = "manifest.json"
INSIDE = "evaluations/*/step_*"
"""Run folders inside a run folder."""


@dataclass(frozen=True)
class Finding:
    """A place where a log differs from what was written."""

    line: int | None  # of audit.jsonl, from 1; None if the finding is about the head
    message: str

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


@dataclass(frozen=True)
class AuditCheck:
    """The result of a verification."""

    folder: Path
    lines: int  # of the log
    receipts: int  # of this log, that were compared
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]  # what is not as usual, and no tampering


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a log in order. Skip lines that are not entries.

    Raises RecipeError if there is no log, or if it cannot be read.
    """
    data = _content(folder / LOG)
    if data is None:
        raise _no_log(folder)
    return [entry for _, entry in _entries(data) if entry is not None]


def verify(folder: Path) -> AuditCheck:
    """Verify the log in a folder against its head and its receipts.

    The receipts are those in the runs, exports and registries below the folder, and in those that the log names. Other
    processes may append to the log meanwhile. Raises RecipeError if there is neither a log nor a receipt of one, or if a file
    cannot be read.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    named = [entry for _, entry in _entries(_content(folder / LOG) or b"") if entry]
    kept = list(_receipts(dict.fromkeys((*_below(folder), *_named(named))), notes))
    data, head = _at_one_moment(folder)  # after the receipts, for a line is there before its receipt
    entries = list(_entries(data or b""))
    own = _of_this_log(folder, entries, kept, notes)
    if data is None:
        if head is None and not own:
            raise _no_log(folder)
        findings.append(Finding(None, f"{LOG} is gone"))
    findings += _of_chain(entries)
    findings += _of_head(head, data or b"", entries, notes)
    findings += _of_receipts(entries, own)
    return AuditCheck(folder, len(entries), len(own), tuple(dict.fromkeys(findings)), tuple(notes))


def _at_one_moment(folder: Path) -> tuple[bytes | None, bytes | None]:
    """Return (log, head) as of one moment.

    A writer changes the head before and after each line. So both files are read again if the head has changed meanwhile, up to
    TRIES times.
    """
    data, head = None, None
    for _ in range(TRIES):
        head, data = _content(folder / HEAD), _content(folder / LOG)
        if _content(folder / HEAD) == head:
            break
    return data, head


def _no_log(folder: Path) -> RecipeError:
    return RecipeError(Problem("root", "file-not-found", f"got {folder}, which has no {LOG}; expected the folder of a log"))


def _content(path: Path) -> bytes | None:
    """Return the content of a file; None if the file does not exist. Raises RecipeError if it cannot be read."""
    try:
        with user_files.open_file(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecipeError(Problem("root", "unreadable", f"{path} cannot be read: {error.strerror}")) from None


def _entries(data: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield (line, entry) for each complete line; the entry is None if the line is not an entry of an audit log."""
    for line in data.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        yield line, entry if _has(entry, FIELDS) else None


def _has(value: Any, types: dict[str, type]) -> bool:
    """Return whether a value is a dict with exactly the keys of `types`, and each value has the type of its key."""
    return isinstance(value, dict) and value.keys() == types.keys() and all(type(value[key]) is types[key] for key in types)


# ---- the chain ----------------------------------------------------------------------------------------------------------


def _of_chain(entries: list[tuple[bytes, dict[str, Any] | None]]) -> Iterator[Finding]:
    number, previous, before = 0, FIRST, 0  # of the last entry, and its line
    numbers = [entry["number"] for _, entry in entries if entry]
    for at, (line, entry) in enumerate(entries, 1):
        if entry is None:
            yield Finding(at, "is not an entry of an audit log")
            continue
        if hash_of(entry) != entry["hash"]:
            yield Finding(at, f"was changed: its content does not match its hash {_short(entry['hash'])}")
        elif as_line(entry).encode() != line:
            yield Finding(at, "was changed: its spacing or characters are not as a writer leaves them")
        if entry["number"] != number + 1:
            yield Finding(at, _misplaced(entry["number"], number, numbers, before))
        elif entry["previous"] != previous:
            yield Finding(at, f"does not follow line {before}: one of the two lines was replaced")
        number, previous, before = entry["number"], entry["hash"], at


def _misplaced(number: int, last: int, numbers: list[int], before: int) -> str:
    """Return the message about an entry whose number is not `last` + 1.

    number: its number. last, before: number and line of the entry before it. numbers: the numbers of all entries.
    """
    where = f"has number {number}; expected {last + 1}"
    if numbers.count(number) > 1:
        return f"{where}: another line has this number too, so one of them was inserted"
    if number < last or last + 1 in numbers:
        return f"{where}: lines were reordered"
    missing = f"line {last + 1} is" if number == last + 2 else f"lines {last + 1} to {number - 1} are"
    return f"{where}: {missing} missing {f'after line {before}' if before else 'before it'}"


# ---- the head -----------------------------------------------------------------------------------------------------------


def _of_head(
    content: bytes | None, data: bytes, entries: list[tuple[bytes, dict[str, Any] | None]], notes: list[str]
) -> Iterator[Finding]:
    if content is None:
        if data:
            yield Finding(None, f"{HEAD} is gone, so lines may be missing at the end")
        return
    try:
        text = content.decode()
        head = Head.parse(text)
    except ValueError as error:
        yield Finding(None, f"{HEAD} was changed: {error}")
        return
    numbers: dict[int, str] = {entry["number"]: entry["hash"] for _, entry in entries if entry}
    last = max(numbers, default=0)
    complete = [line.split(" ")[1:] for line in text.split("\n")[:-1] if line.startswith("end ")]
    for place, (number, _) in enumerate(complete, 1):
        if int(number) != place:
            yield Finding(None, f"{HEAD} was changed: it has number {number} in place of {place}")
            return
    for number, own in ((int(number), own) for number, own in complete):
        if number in numbers and numbers[number] != own:
            yield Finding(_line_of(number, entries), f"was replaced: its hash in {HEAD} is {_short(own)}")
    if last < head.number:
        gone = f"line {head.number} is" if head.number == last + 1 else f"lines {last + 1} to {head.number} are"
        yield Finding(last + 1, f"is missing: {HEAD} counts {plural(head.number, 'line')}, so {gone} gone from the end")
    if last > head.number and head.begun != (last, numbers[last]):
        yield Finding(_line_of(head.number + 1, entries), f"was added: {HEAD} counts {plural(head.number, 'line')}")
    elif head.begun and head.begun[0] > last:
        why = "its writer is still at work, its writer was killed, or the line was removed"
        notes.append(f"line {head.begun[0]} was begun, but is missing: {why}")
    if not data.endswith(b"\n") and data:
        if head.begun and head.begun[0] == last + 1:
            notes.append("the last line is incomplete: its writer is still at work or was killed. The next writer removes it")
        else:
            yield Finding(len(entries) + 1, "is incomplete, and no writer had begun it")


def _line_of(number: int, entries: list[tuple[bytes, dict[str, Any] | None]]) -> int:
    """Return the line of the entry with a number. Return the number itself if no entry has it."""
    return next((at for at, (_, entry) in enumerate(entries, 1) if entry and entry["number"] == number), number)


# ---- receipts -----------------------------------------------------------------------------------------------------------


def _of_receipts(entries: list[tuple[bytes, dict[str, Any] | None]], kept: list[tuple[Path, Receipt]]) -> Iterator[Finding]:
    hashes: dict[int, set[str]] = {}
    for _, entry in entries:
        if entry:
            hashes.setdefault(entry["number"], set()).add(entry["hash"])
    wrong = [(receipt.number, path, receipt) for path, receipt in kept if receipt.hash not in hashes.get(receipt.number, ())]
    for number, path, receipt in sorted(wrong, key=lambda each: (each[0], str(each[1])))[:1]:
        if number not in hashes:
            yield Finding(number, f"is missing: {path} has a receipt of it, {_short(receipt.hash)}")
        else:
            why = f"is not what was written: its hash in {path} is {_short(receipt.hash)}"
            rewritten = "the log was rewritten from this line or an earlier one"
            yield Finding(_line_of(number, entries), f"{why}, so {rewritten}")


def _of_this_log(
    folder: Path,
    entries: list[tuple[bytes, dict[str, Any] | None]],
    kept: list[tuple[Path, Receipt]],
    notes: list[str],
) -> list[tuple[Path, Receipt]]:
    """Return the receipts that belong to the log in this folder, even if the log was moved here.

    A receipt names the folder of its log. If that folder has a log, and is another folder, the receipt is skipped. If it no
    longer has a log, its receipts belong to this log when any of them fits a line here, or when this log is empty. Otherwise
    `notes` gets a line about the folder, because its runs came from elsewhere.
    """
    lines = {(entry["number"], entry["hash"]) for _, entry in entries if entry}
    moved = {receipt.folder for _, receipt in kept if not entries or (receipt.number, receipt.hash) in lines}
    own, others = [], {}
    for path, receipt in kept:
        is_here = os.path.realpath(receipt.folder) == os.path.realpath(folder)
        if not is_here and os.path.exists(Path(receipt.folder) / LOG):
            continue
        if is_here or receipt.folder in moved:
            own.append((path, receipt))
        else:
            others.setdefault(receipt.folder, []).append(path)
    for other, paths in others.items():
        what = f"{plural(len(paths), 'receipt')} of a log in {other}, which does not exist; the first is in {paths[0]}"
        notes.append(f"not compared: {what}. No line here matches any of them, so they probably belong to another log")
    return own


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files with receipts of the runs, evaluations, exports and registries below a folder; some may not exist."""
    for run_dir in find(folder, DEEPEST):
        yield from (inner / MANIFEST for inner in (run_dir, *sorted(run_dir.glob(INSIDE))))
        yield input_records.exports_of(run_dir)
    yield from sorted(folder.glob("registry/*.json"))


def _named(entries: list[dict[str, Any]]) -> Iterator[Path]:
    """Yield the files with receipts of the runs, exports and registries that log entries name; some may not exist."""
    for action, subject in sorted({(entry["action"], Path(entry["subject"])) for entry in entries}):
        if action in ("add", "promote"):
            yield subject
        elif action == "submit":
            yield subject / MANIFEST
        elif action == "export":
            yield input_records.exports_of(subject)


def _receipts(paths: Iterable[Path], notes: list[str]) -> Iterator[tuple[Path, Receipt]]:
    """Yield (file, receipt) for each receipt in files of JSON or JSON lines. Adds a note for an unreadable file."""
    for path in paths:
        try:
            is_exports = path.name == input_records.EXPORTS
            content = list(input_records.read_exports(path.parents[1])) if is_exports else small_files.read(path, object)
        except (OSError, RecipeError) as error:
            notes.append(f"receipts cannot be read: {error}")
            continue
        yield from ((path, receipt) for receipt in _within(content))


def _within(value: Any) -> Iterator[Receipt]:
    """Yield each receipt inside a JSON value, at any depth."""
    if _has(value, RECEIPT):
        yield Receipt(**value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _within(inner)


def _short(own: Any) -> str:
    return f"{str(own)[:12]}..."


def everything(check: AuditCheck) -> Iterator[str]:
    """Yield the text lines that report a verification: findings, notes, and a summary."""
    yield from map(str, chain(check.findings, (f"note: {note}" for note in check.notes)))
    counted = f"{check.folder / LOG}: {plural(check.lines, 'line')}, {plural(check.receipts, 'receipt')} in other files"
    yield f"{counted}: {plural(len(check.findings), 'finding') if check.findings else 'as it was written'}"
