"""Verify or show the audit log of a runs root: `python launch/audit.py verify|show [root=FOLDER]`.

`verify` computes every hash again, and compares the log with its head and with the receipts of runs, exports and registries. It
names each line that was changed, dropped, inserted, moved or replaced. `show` prints the log, or a part of it.

`verify` cannot detect two changes: lines after the last submission, export or promotion that were dropped or rewritten together
with audit.head, and a log that was rewritten together with all receipts. Only root can compare the receipts of all users,
because run folders are private; other users compare the log, its head and their own receipts. A log may be moved with its runs.
A note names a run folder with a receipt of a log that is not here; a log that was moved and then rewritten from its first line
is reported in the same way.

Exit status: 0; 1 if `verify` found something; 2 if the command line has an error, or if there is no log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.governance import audit_check
from launch.governance.audit_log import ACTIONS, Action
from launch.terminal import command_line, console
from launch.terminal.command_line import Key
from launch.terminal.safe_text import on_one_line
from pipeline.config import Problem

HEADER = ("line", "time (UTC)", "user", "host", "action", "subject", "details")


@dataclass(frozen=True)
class AuditRequest:
    """The command line."""

    what: Annotated[Literal["verify", "show"], Key("verify|show", "what to do", bare=True)]
    root: Annotated[Path, Key("FOLDER", "the folder of the log; default: runs")] = Path("runs")
    run: Annotated[str | None, Key("RUN", "show: only lines about this run folder or name, or about anything inside it")] = None
    user: Annotated[str | None, Key("NAME", "show: only lines of this user")] = None
    action: Annotated[Action | None, Key("ACTION", f"show: only lines of this action: {', '.join(ACTIONS)}")] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that the command does not read."""
        for key in ("run", "user", "action"):
            if self.what == "verify" and getattr(self, key) is not None:
                yield Problem(key, "has-no-effect", "got a value with verify, which checks the whole log; expected none")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, AuditRequest, execute, arguments)


def execute(request: AuditRequest) -> int:
    """Verify or show the log, and return the exit status. Raises RecipeError."""
    folder = request.root.absolute()
    if request.what == "verify":
        check = audit_check.verify(folder)
        print("\n".join(map(on_one_line, audit_check.everything(check))))
        return 1 if check.findings else 0
    rows = [_row(entry) for entry in audit_check.read(folder) if _is_shown(entry, request)]
    if not rows:
        print(f"no lines in {folder} match")
    elif sys.stdout.isatty():
        console.print_table(HEADER, rows)
    else:
        print("\n".join("  ".join(map(on_one_line, row)) for row in rows))
    return 0


def _is_shown(entry: dict[str, Any], request: AuditRequest) -> bool:
    subject = Path(entry["subject"])
    is_asked = (
        request.run is None
        or request.run in (subject.name, str(subject))
        or Path(request.run).absolute() in (subject, *subject.parents)
    )
    return is_asked and request.user in (None, entry["user"]) and request.action in (None, entry["action"])


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    shown = ", ".join(f"{key} {_value(value)}" for key, value in entry["details"].items() if value not in (None, "", {}, []))
    time = entry["time"].partition(".")[0].replace("T", " ")
    return str(entry["number"]), time, entry["user"], entry["host"], entry["action"], entry["subject"], shown


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:12]}..." if len(text) == 64 else text  # a hash


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
