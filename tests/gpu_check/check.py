"""The course of the check: its time, its results, its end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

from tests.gpu_check import table
from tests.gpu_check.measurement import Place, said
from tests.gpu_check.parts import MACHINE, Part, every, missing
from tests.gpu_check.processes import Processes
from tests.gpu_check.table import CUT, FAILED, LATE, LEFT_OUT, Result

FORMAT = 1
"""The version of the file's format. launch/plan/gpu_check.py reads the file, and changes with it."""
NOTHING_TO_CHECK = 2
NO_TIME = "no time"


class Ended(BaseException):
    """A signal ends the check."""


class Check:
    """Runs the parts and keeps their results."""

    def __init__(self, place: Place, options: dict[str, str]):
        self._ends = time.monotonic() + float(options["total"])
        self._place = place
        self._out = _out(options["out"])
        self._processes = Processes(place)
        self._results = _earlier(options["after"], place)
        self._kept = {name for name, result in self._results.items() if not _had_no_time(result)}
        self._running: tuple[Part, float] | None = None  # and when it has begun

    @property
    def _machine(self) -> dict[str, Any]:
        return self._results[MACHINE].details if MACHINE in self._results else {}

    def run(self, wanted: tuple[str, ...]) -> int:
        """Run the parts whose names begin so, and return the status.

        Parts that are named run again, and replace what an earlier check found of them.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._cut)
        try:
            first, *others = every(self._place)
            named = "" not in wanted
            self._run(first)
            gpus = self._machine.get("gpus", [])
            if self._machine and self._place.device == "cuda" and not gpus:
                print("gpu_check: there is no GPU that torch can use. The CPU's tests: make test")
                return NOTHING_TO_CHECK
            self._place = self._processes.place = dataclasses.replace(self._place, gpus=len(gpus))
            self._write()
            for part in others if self._machine else []:
                if part.name.startswith(wanted) and (named or part.name not in self._kept):
                    self._run(part)
                    self._write()
        except Ended:
            pass
        finally:
            self._processes.end_worker()
        print(table.text(self._machine, [*self._results.values()]))
        return int(any(result.outcome in (FAILED, CUT) for result in self._results.values()))

    def _run(self, part: Part) -> None:
        """Run a part in what is left of the time, or leave it out."""
        begin = time.monotonic()
        left, own = self._ends - begin, _limit(part, self._place)
        print(f"{part.name} ...", flush=True)
        result = self._left_out(part, left)
        if result is None:
            self._running = part, begin
            try:
                result = self._processes.run(part, min(left, own))
            except Exception as error:  # of its command or of the reading of its output
                traceback.print_exc()
                result = Result(part.name, FAILED, said(error))
            if result.outcome == LATE:
                result.outcome = CUT if left < own else FAILED
            self._running = None
            self._add(result, begin)
        if result.outcome != LEFT_OUT or part.name not in self._kept:
            self._results[part.name] = result
        print(f"    {result.outcome}: {table.row(result)}", flush=True)

    def _left_out(self, part: Part, left: float) -> Result | None:
        """Return the result of a part that cannot run here, or not in time."""
        seconds = self._processes.expected(part)
        if absent := missing(*part.needs):
            note = f"not installed: {', '.join(absent)}"
        elif part.gpus > self._place.gpus and part.gpus > 1 and self._place.device == "cuda":
            note = f"needs {part.gpus} GPUs"
        elif seconds > left and part.name != MACHINE:
            note = f"{NO_TIME} (needs about {seconds:.0f} s, {max(left, 0):.0f} s are left)"
        else:
            return None
        return Result(part.name, LEFT_OUT, note)

    def _add(self, result: Result, begin: float) -> None:
        """Add the part's time and, unless it has passed, its log."""
        result.seconds = round(time.monotonic() - begin, 1)
        if result.outcome in (FAILED, CUT):
            result.log = self._processes.log
            print(result.log)

    def _cut(self, number: int, _: object) -> None:
        """Record the running part as cut, write, and let `run` end."""
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        if self._running:
            part, begin = self._running
            result = Result(part.name, CUT, f"ended by {signal.Signals(number).name}")
            self._add(result, begin)
            if part.name != MACHINE or not self._machine:  # an earlier check has described it
                self._results[part.name] = result
        self._write()
        raise Ended

    def _write(self) -> None:
        results = [dataclasses.asdict(result) for result in self._results.values()]
        record = _heading(self._place) | {"machine": self._machine, "results": results}
        temporary = self._out.with_name(f".{self._out.name}.tmp")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(self._out)


def _limit(part: Part, place: Place) -> float:
    """Return the seconds after which a part is taken to hang. Others may use the CPU."""
    return 30 + 3 * part.expected(place) if place.device == "cuda" else 300 + 10 * part.expected(place)


def _out(given: str) -> Path:
    folder = os.environ.get("OUT", "")
    return Path(given or Path(folder if os.path.isdir(folder) else ".", "gpu_check.json"))


def _heading(place: Place) -> dict[str, Any]:
    """Return what tells readers of the file, such as launch/plan/gpu_check.py, what it is."""
    return {"format": FORMAT, "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": place.device, "size": place.size}


def _earlier(path: str, place: Place) -> dict[str, Result]:
    """Return the results of an earlier check, by part. Exit if that was of another device or size."""
    if not path:
        return {}
    record = json.loads(Path(path).read_text())
    for name, wanted in _heading(place).items():
        if name != "date" and record.get(name) != wanted:
            raise SystemExit(f"gpu_check: after={path}: got {name} {record.get(name)!r}; expected {wanted!r}")
    return {result["part"]: Result(**result) for result in record["results"]}


def _had_no_time(result: Result) -> bool:
    return result.outcome == CUT or (result.outcome == LEFT_OUT and result.note.startswith(NO_TIME))
