"""Compare the runs of every tiny recipe in two checkouts, to the last bit.

    python -m tests.curves.same CHECKOUT [recipe ...] [steps=4] [folder=DIR]

CHECKOUT is another checkout's root folder. Both checkouts' runs use this Python, on CPUs. Recipes that others need
run whole, the others for so many steps. Prints a Markdown table: steps, how many values and files were compared, and the first
one that differs. Ends with status 1 if one differs. Runs that are complete in the folder are not run again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import config
from pipeline.observe.metrics import NOT_REPRODUCIBLE, read
from tests.curves.__main__ import ROOT, recipes

TIMEOUT_S = 1800
FREE = ("tiny_async",)  # engines sample while the policy learns: which version samples depends on time


@dataclass
class Left:
    """The parts of a run's folder that must be the same in both checkouts."""

    steps: int
    values: dict[tuple[int, str], Any] = field(default_factory=dict)  # (step, metric) -> value
    files: dict[str, str] = field(default_factory=dict)  # weights: path in the run folder -> SHA-256

    def differences(self, other: Left) -> list[str]:
        found = [f"{name} at step {step}" for step, name in self.values.keys() ^ other.values.keys()]
        found += [
            f"{name} at step {step}: {value!r}, {other.values[step, name]!r}"
            for (step, name), value in self.values.items()
            if (step, name) in other.values and other.values[step, name] != value
        ]
        return found + [
            name for name in self.files.keys() | other.files.keys() if self.files.get(name) != other.files.get(name)
        ]


def left(run_dir: Path) -> Left:
    lines = read(run_dir / "metrics.jsonl")
    found = Left(len(lines))
    for line in lines:
        found.values |= {(line["step"], key): value for key, value in line.items() if not key.startswith(NOT_REPRODUCIBLE)}
    for path in sorted(run_dir.rglob("*.safetensors")):
        with path.open("rb") as file:
            found.files[str(path.relative_to(run_dir))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def run(checkout: Path, recipe: str, folder: Path, overrides: list[str]) -> Left:
    """Run a checkout's recipe in a folder for its runs. Raises RuntimeError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [f"recipe={recipe}", "cluster.executor=local", f"run_dir=runs/{recipe}", *overrides]
    command = [sys.executable, str(checkout / "launch/submit.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {result.returncode}\n{(result.stdout + result.stderr)[-3000:]}")
    return left(folder / "runs" / recipe)


def main(arguments: list[str]) -> int:
    given, (checkout, *names) = split_names(arguments)
    folder = Path(given.get("folder", "runs/same")).absolute()
    asked = [name for name in names or recipes() if name not in FREE]
    needed = {config.name_of(need) for name in recipes() for need in config.load(name).needs}
    different = 0
    print("| recipe | steps | values | weight files | differs |\n|---|---|---|---|---|")
    for name in sorted(asked, key=lambda one: (one not in needed, bool(config.load(one).needs), one)):
        steps = [] if name in needed else [f"{config.load(name).algorithm}.max_num_steps={given.get('steps', 4)}"]
        with ThreadPoolExecutor(2) as pool:
            sides = [pool.submit(run, Path(root).absolute(), name, folder / side, steps) for side, root in
                     (("before", checkout), ("after", ROOT))]  # fmt: skip
        before, after = (side.result() for side in sides)
        found = before.differences(after)
        different += bool(found)
        print(
            f"| {name} | {after.steps} | {len(after.values)} | {len(after.files)} | {found[0] if found else 'nothing'} |",
            flush=True,
        )
    return 1 if different else 0


def split_names(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return (values of this command's keys, words without `=`)."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    return given, [word for word in arguments if "=" not in word]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
