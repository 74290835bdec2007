"""Parts for the tests of the check: programs, and calls of this module by the worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu_check.measurement import Measurement, Place
from tests.gpu_check.parts import Part
from tests.gpu_check.table import FAILED, PASSED, Result


def place(folder: Path, gpus: int = 0) -> Place:
    return Place("cpu", "tiny", gpus, folder)


def program(text: str, name: str = "program", **changes: Any) -> Part:
    """Return a part that is a program of Python."""
    return Part(name, (1, 1), (), command=lambda: [sys.executable, "-c", text], judge=_judge, **changes)


def _judge(name: str, status: int, output: str) -> Result:
    return Result(name, FAILED if status else PASSED, output.strip())


def called(function: str, *arguments: str, name: str = "called", **changes: Any) -> Part:
    """Return a part that the worker calls: a function below."""
    return Part(name, (1, 1), (), ("samples", function, *arguments), **changes)


def written(path: Path) -> dict[str, dict]:
    """Return the results of a file by part."""
    return {result["part"]: result for result in json.loads(path.read_text())["results"]}


# ---- calls --------------------------------------------------------------------------------------------------------------


def machine(place: Place) -> Measurement:
    return Measurement(details={"gpus": [], "versions": {}, "cuda": None})


def process(place: Place) -> Measurement:
    return Measurement({"pid": os.getpid()})


def fails(place: Place) -> Measurement:
    raise ValueError("wrong\nand more")


def dies(place: Place) -> Measurement:
    print("before its end", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return Measurement()


def sleep(place: Place, folder: str) -> Measurement:
    """Sleep beside a child, whose number is in the folder."""
    child = subprocess.Popen(["sleep", "600"])
    temporary = Path(folder, "child.tmp")
    temporary.write_text(str(child.pid))
    temporary.replace(Path(folder, "child"))
    time.sleep(600)
    return Measurement()


def prints(place: Place) -> Measurement:
    print("printed by Python")
    sys.stdout.flush()
    os.write(1, b"printed by C\n")
    return Measurement(note="measured")


def problems(place: Place) -> Measurement:
    measured = Measurement(note="a note")
    measured.limit("low", 0.5, 1.0)
    measured.limit("high", 2.0, 1.0)
    measured.attempt({"a": lambda: {}["b"], "c": lambda: None})
    return measured
