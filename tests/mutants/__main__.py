"""Plant each fault of faults.yaml in a copy of this checkout and check that the default tests find it.

python -m tests.mutants [words of the faults ...]

Prints a Markdown table: the fault, the first test that failed, seconds. A fault whose tests pass is not found. Exits with
status 1 if a fault is not found or its line no longer exists.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900
COPIED = ("pipeline", "launch", "recipes", "tests", "containers", "pyproject.toml")


def main(words: Sequence[str]) -> int:
    faults = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())
    asked = [fault for fault in faults if all(word in fault["fault"] for word in words)]
    found = 0
    print("| fault | file | found by | s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "hetstep"
        copy.mkdir()
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        for fault in asked:
            begun = time.monotonic()
            by = planted(copy, fault)
            found += bool(by)
            print(
                f"| {fault['fault']} | `{fault['file']}` | {by or '**nothing**'} | {time.monotonic() - begun:.0f} |", flush=True
            )
    print(f"\n{found} of {len(asked)} found")
    return 0 if found == len(asked) else 1


def planted(copy: Path, fault: dict[str, str]) -> str:
    """Return the first test that fails with a fault and passes without it, "" if none does.

    Raises ValueError if the fault's line is not there once, RuntimeError if the test fails without the fault too.
    """
    path = copy / fault["file"]
    text = path.read_text()
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['file']}: the line of '{fault['fault']}' is there {text.count(fault['old'])} times")
    path.write_text(text.replace(fault["old"], fault["new"]))
    try:
        failed = first_failure(copy, fault["tests"].split())
    finally:
        path.write_text(text)
    if failed and first_failure(copy, [failed]):
        raise RuntimeError(f"{failed} fails without the fault '{fault['fault']}' too")
    return f"`{failed}`" if failed else ""


def first_failure(copy: Path, tests: Sequence[str]) -> str:
    """Run tests up to the first failure and return its name, "" if all pass. Raises RuntimeError if pytest cannot run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.M)
    if ran.returncode and not failed:
        raise RuntimeError(f"{' '.join(command)}: status {ran.returncode}\n{(ran.stdout + ran.stderr)[-3000:]}")
    return failed.group(1) if failed else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
