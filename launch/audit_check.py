"""Verify an audit log: its chain of hashes, its head, and the receipts that runs, exports and registries keep of its lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from launch.audit_log import FIRST, HEAD, LOG, Head, Receipt, as_line, hash_of
from launch.run_folder import find
from launch.units import plural
from pipeline.config import Problem, RecipeError

FIELDS = {"action", "details", "hash", "host", "number", "previous", "subject", "time", "user"}
INSIDE = "evaluations/*/step_*"
"""Run folders inside a run folder."""


@dataclass(frozen=True)
class Finding:
    """A place where a log is not as it was written."""

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
    """Return the entries of a log in order, without lines that are no entry.

    Raises RecipeError if there is no log, or if it cannot be read.
    """
    return [entry for _, entry in _entries(_bytes(folder)) if entry is not None]


def verify(folder: Path) -> AuditCheck:
    """Verify the log in a folder, against the receipts of the runs below it and of the runs that it names.

    Raises RecipeError if there is neither a log nor anything that keeps a receipt of one, or if a file cannot be read.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    kept = list(_receipts(folder))
    if os.path.exists(folder / LOG):
        data = _bytes(folder)
    elif os.path.exists(folder / HEAD) or any(_is_of(receipt, folder) for _, receipt in kept):
        data = b""
        findings.append(Finding(None, f"{LOG} is gone"))
    else:
        raise RecipeError(Problem("root", "file-not-found", f"got {folder}, which has no {LOG}; expected the folder of a log"))
    entries = list(_entries(data))
    findings += _of_chain(entries)
    findings += _of_head(folder, data, entries, notes)
    kept += _elsewhere([entry for _, entry in entries if entry], {path for path, _ in kept})
    kept = [(path, receipt) for path, receipt in kept if _is_of(receipt, folder)]
    findings += _of_receipts(entries, kept)
    return AuditCheck(folder, len(entries), len(kept), tuple(dict.fromkeys(findings)), tuple(notes))


def _bytes(folder: Path) -> bytes:
    try:
        return (folder / LOG).read_bytes()
    except FileNotFoundError:
        raise RecipeError(Problem("root", "file-not-found", f"got {folder}, which has no {LOG}; expected a log")) from None
    except OSError as error:
        raise RecipeError(Problem("root", "unreadable", f"{folder / LOG} cannot be read: {error.strerror}")) from None


def _entries(data: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield (line, entry) of each line that has its end; None for a line that is no entry of a log."""
    for line in data.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
            is_entry = isinstance(entry, dict) and set(entry) == FIELDS and isinstance(entry["number"], int)
            yield line, entry if is_entry else None
        except ValueError:
            yield line, None


# ---- the chain ----------------------------------------------------------------------------------------------------------


def _of_chain(entries: list[tuple[bytes, dict[str, Any] | None]]) -> Iterator[Finding]:
    number, previous, before = 0, FIRST, 0  # of the last entry, and its line
    numbers = [entry["number"] for _, entry in entries if entry]
    for at, (line, entry) in enumerate(entries, 1):
        if entry is None:
            yield Finding(at, "is no entry of an audit log")
            continue
        if hash_of(entry) != entry["hash"]:
            yield Finding(at, f"was changed: its content does not give its hash {_short(entry['hash'])}")
        elif as_line(entry).encode() != line:
            yield Finding(at, "was changed: its blanks or characters are not as they are written")
        if entry["number"] != number + 1:
            yield Finding(at, _misplaced(entry["number"], number, numbers, before))
        elif entry["previous"] != previous:
            yield Finding(at, f"does not follow line {before}: one of the two was put in the place of another")
        number, previous, before = entry["number"], entry["hash"], at


def _misplaced(number: int, last: int, numbers: list[int], before: int) -> str:
    """Return what is wrong with an entry whose number does not follow `last`, that of the entry in line `before`."""
    where = f"has number {number}, and expected is {last + 1}"
    if numbers.count(number) > 1:
        return f"{where}: another line has this number too, so one of them was inserted"
    if number < last or last + 1 in numbers:
        return f"{where}: lines were reordered"
    missing = f"line {last + 1} is" if number == last + 2 else f"lines {last + 1} to {number - 1} are"
    return f"{where}: {missing} missing {f'after line {before}' if before else 'before it'}"


# ---- the head -----------------------------------------------------------------------------------------------------------


def _of_head(
    folder: Path, data: bytes, entries: list[tuple[bytes, dict[str, Any] | None]], notes: list[str]
) -> Iterator[Finding]:
    path = folder / HEAD
    try:
        text = path.read_text()
    except FileNotFoundError:
        if data:
            yield Finding(None, f"{HEAD} is gone, so lines may be missing at the end")
        return
    except (OSError, ValueError) as error:
        yield Finding(None, f"{HEAD} cannot be read: {error}")
        return
    try:
        head = Head.parse(text)
    except ValueError as error:
        yield Finding(None, f"{HEAD} was changed: {error}")
        return
    numbers: dict[int, str] = {entry["number"]: entry["hash"] for _, entry in entries if entry}
    last = max(numbers, default=0)
    complete = [line.split(" ")[1:] for line in text.split("\n")[:-1] if line.startswith("end ")]
    for place, (number, _) in enumerate(complete, 1):
        if int(number) != place:
            yield Finding(None, f"{HEAD} was changed: it has number {number} where {place} follows")
            return
    for number, own in ((int(number), own) for number, own in complete):
        if number in numbers and numbers[number] != own:
            yield Finding(_line_of(number, entries), f"was replaced: {HEAD} has {_short(own)} as its hash")
    if last < head.number:
        gone = f"line {head.number} is" if head.number == last + 1 else f"lines {last + 1} to {head.number} are"
        yield Finding(last + 1, f"is missing: {HEAD} counts {plural(head.number, 'line')}, so {gone} gone from the end")
    if last > head.number and head.begun != (last, numbers[last]):
        yield Finding(_line_of(head.number + 1, entries), f"was added: {HEAD} counts {plural(head.number, 'line')}")
    elif head.begun and head.begun[0] > last:
        notes.append(f"line {head.begun[0]} was begun and not written: its writer was killed, or it was removed right after")
    if not data.endswith(b"\n") and data:
        if head.begun and head.begun[0] == last + 1:
            notes.append("the last line has no end: its writer was killed. The next one removes it")
        else:
            yield Finding(len(entries) + 1, "has no end, and was added")


def _line_of(number: int, entries: list[tuple[bytes, dict[str, Any] | None]]) -> int:
    """Return the line of the entry with a number; where it would be if there is none."""
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
            yield Finding(number, f"is missing: {path} keeps its receipt, {_short(receipt.hash)}")
        else:
            why = f"is not what was written: {path} keeps {_short(receipt.hash)} as its hash"
            rewritten = "the log was rewritten from this line or an earlier one"
            yield Finding(_line_of(number, entries), f"{why}, so {rewritten}")


def _receipts(folder: Path) -> Iterator[tuple[Path, Receipt]]:
    """Yield (file, receipt) of everything below a folder that keeps receipts."""
    for run_dir in find(folder):
        for inner in (run_dir, *sorted(run_dir.glob(INSIDE))):
            yield from _of_manifest(inner / "manifest.json")
        yield from _of_lines(run_dir / "lineage/exports.jsonl")
    for path in sorted(folder.glob("registry/*.json")):
        yield from _of_registry(path)


def _elsewhere(entries: list[dict[str, Any]], seen: set[Path]) -> Iterator[tuple[Path, Receipt]]:
    """Yield (file, receipt) of the runs and registries that a log names, without the files that were seen."""
    for action, subject in sorted({(str(entry["action"]), Path(str(entry["subject"]))) for entry in entries}):
        if action in ("add", "promote") and subject not in seen:
            yield from _of_registry(subject)
        elif action == "submit" and subject / "manifest.json" not in seen:
            yield from _of_manifest(subject / "manifest.json")
        elif action == "export" and subject / "lineage/exports.jsonl" not in seen:
            yield from _of_lines(subject / "lineage/exports.jsonl")


def _of_manifest(path: Path) -> Iterator[tuple[Path, Receipt]]:
    for entry in _json(path) or ():
        yield from _found(path, entry.get("audit"))


def _of_lines(path: Path) -> Iterator[tuple[Path, Receipt]]:
    try:
        lines = path.read_text().split("\n")[:-1]
    except OSError:
        return
    for line in lines:
        yield from _found(path, json.loads(line).get("audit"))


def _of_registry(path: Path) -> Iterator[tuple[Path, Receipt]]:
    for version in (_json(path) or {}).get("versions", ()):
        for each in version.get("history", ()):
            yield from _found(path, each.get("audit"))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # no such file, or another's
        return None


def _found(path: Path, kept: Any) -> Iterator[tuple[Path, Receipt]]:
    if isinstance(kept, dict) and set(kept) == {each.name for each in fields(Receipt)}:
        yield path, Receipt(**kept)


def _is_of(receipt: Receipt, folder: Path) -> bool:
    """Return whether a receipt is of the log in this folder, which may have been moved."""
    if os.path.realpath(receipt.folder) == os.path.realpath(folder):
        return True
    return not os.path.exists(Path(receipt.folder) / LOG)


def _short(own: Any) -> str:
    return f"{str(own)[:12]}..."


def everything(check: AuditCheck) -> Iterator[str]:
    """Yield the lines of a verification for people: findings, notes, and a verdict."""
    yield from map(str, chain(check.findings, (f"note: {note}" for note in check.notes)))
    counted = f"{check.folder / LOG}: {plural(check.lines, 'line')}, {plural(check.receipts, 'receipt')} of them elsewhere"
    yield f"{counted}: {plural(len(check.findings), 'finding') if check.findings else 'as it was written'}"
