"""Check this machine: python -m tests.gpu_check [parts=NAME,NAME] [out=FILE] [size=full|tiny] [device=cuda|cpu]

The parts, in this order: the tests that need a GPU, by area; small runs from end to end; then measurements of random weights: a
training step (tokens a second, share of the GPU's peak, memory beside the plan's), decoding, and a refit between processes of
this machine. Each runs in a process of its own. A part whose packages are not installed is left out, and says so. No network is
needed. `parts` are beginnings of names, such as parts=train,decode.

Writes gpu_check.json and ends with a table. The status is 0 if no part failed, 1 if one did, and 2 if there is no GPU, or if
packages are missing without which nothing runs. size=tiny and device=cpu are for tests of this program: the tests that need a
GPU are only collected then.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.gpu_check import parts, table
from tests.gpu_check.parts import Part, Setting
from tests.gpu_check.table import Result

LIMIT_S = 1800.0
"""Time limit of one part."""
RUN_ENDS_S = 30.0
"""Time for a run's controller to end its ranks and itself."""
NOTHING_TO_CHECK = 2
OPTIONS = {"parts": "", "out": "gpu_check.json", "size": "full", "device": "cuda"}


def main(arguments: list[str]) -> int:
    options = dict(OPTIONS)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in OPTIONS or not equals:
            print(f"gpu_check: got {argument}; expected one of {', '.join(f'{each}=...' for each in OPTIONS)}")
            return NOTHING_TO_CHECK
        options[name] = value
    if why := _nothing_to_check(options["device"]):
        print(f"gpu_check: {why}")
        return NOTHING_TO_CHECK
    wanted = tuple(filter(None, options["parts"].split(",")))
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        setting = Setting(options["device"], options["size"], Path(folder))
        every = list(parts.every(setting))
        for beginning in wanted:
            if not any(part.name.startswith(beginning) for part in every):
                names = ", ".join(part.name for part in every)
                print(f"gpu_check: parts: got {beginning}; expected beginnings of {names}")
                return NOTHING_TO_CHECK
        chosen = [part for part in every if part.name.startswith(wanted or "")]
        for number, part in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {part.name} ...", flush=True)
            results.append(run(part, setting))
            print(f"      {results[-1].outcome} {results[-1].note}".rstrip(), flush=True)
    record = {"machine": _machine(options["device"]), "results": [asdict(result) for result in results]}
    Path(options["out"]).write_text(json.dumps(record, indent=1) + "\n")
    print(table.text(record["machine"], results))
    return int(any(result.outcome == table.FAILED for result in results))


def _nothing_to_check(device: str) -> str:
    """Return why nothing can be checked here, "" if something can."""
    if missing := parts.missing("torch"):
        return f"this Python ({sys.executable}) has no {missing[0]}. Try make setup, or make gpu-check PYTHON=..."
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"there is no GPU that torch {torch.__version__} can use. The CPU's tests: make test"
    if missing := parts.missing(*parts.CORE):
        return f"without {', '.join(missing)} nothing runs. Try pip install {' '.join(parts.package(name) for name in missing)}"
    return ""


def run(part: Part, setting: Setting) -> Result:
    """Run a part to its end."""
    if missing := parts.missing(*part.needs):
        return Result(part.name, table.LEFT_OUT, f"not installed: {', '.join(missing)}")
    log, start = setting.folder / "log", time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command,
            cwd=parts.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=setting.environment,
            start_new_session=True,  # so that what the part starts is ended with it
        )
        try:
            status: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process, part.run_dir)
    seconds, said = time.perf_counter() - start, log.read_text(errors="replace")
    if status is None:
        result = Result(part.name, table.FAILED, f"it has not ended within {LIMIT_S:g} s")
    else:
        result = part.judge(part.name, status, said)
    result.seconds = round(seconds, 1)
    if result.outcome == table.FAILED:
        result.log = said[-8000:]
        print(result.log)
    return result


def _end(process: subprocess.Popen, run_dir: Path | None) -> None:
    """End the processes of a part, so that none holds a GPU.

    They are its process group and, for a run, the controller with its ranks.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if run_dir is None:
        return
    from launch.executors.record import read_record

    if record := read_record(run_dir):
        job = record.attach(run_dir)  # in a session of its own
        job.cancel()
        deadline = time.monotonic() + RUN_ENDS_S
        while not job.status(now=True).ended and time.monotonic() < deadline:
            time.sleep(0.1)


def _machine(device: str) -> dict[str, object]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    return {"gpus": gpus, "python": platform.python_version(), "cuda": torch.version.cuda, "versions": parts.versions()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
