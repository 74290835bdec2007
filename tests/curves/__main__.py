"""Plot every tiny recipe's learning curve over seeds and training backends: python -m tests.curves [recipe ...] [key=value ...]

Submits each run as a user would and prints a Markdown table; draws curves.png in the folder. Complete runs there are reused, so
a second call continues after an interruption.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from launch.terminal import command_line
from launch.terminal.command_line import Key
from pipeline import config
from pipeline.observe.metrics import read

ROOT = Path(__file__).parents[2]
METRICS = ("val/accuracy", "val/loss")  # the first that a run has
TIMEOUT_S = 900
LABELS = {"dtensor": "FSDP2", "megatron": "Megatron-Core"}
ON_SLURM = ["cluster.train.nodes=2", "cluster.train.ranks_per_node=1", "cluster.generate.nodes=2"]
ON_SLURM += ["cluster.generate.ranks_per_node=1"]


@dataclass(frozen=True)
class Curve:
    recipe: str
    backend: str
    seed: int
    points: list[tuple[int, float]]  # (step, value)
    metric: str


def recipes() -> list[str]:
    return sorted(path.stem for path in config.RECIPES.glob("tiny_*.yaml"))


def run(recipe: str, backend: str, seed: int, executor: str, folder: Path, overrides: list[str]) -> Curve:
    """Raises RuntimeError if the run fails."""
    loaded = config.load(recipe)
    run_dir = folder / f"{recipe}-{backend}-{executor}-{seed}"
    arguments = [
        f"recipe={recipe}",
        f"cluster.executor={executor}",
        f"{loaded.algorithm}.seed={seed}",
        f"{loaded.algorithm}.val_at_start=true",
        f"policy.{backend}_cfg.enabled=true",
        *(ON_SLURM if executor == "slurm" else []),
        *overrides,
    ]
    submit(run_dir, arguments)
    lines = read(run_dir / "metrics.jsonl")
    metric = next(name for name in METRICS if name in lines[-1])
    return Curve(recipe, backend, seed, [(line["step"], line[metric]) for line in lines if metric in line], metric)


def submit(run_dir: Path, arguments: list[str]) -> None:
    """Run to the end unless it is complete.

    Raises RuntimeError with the end of its output if it fails, or if the folder holds another recipe.
    """
    command = [sys.executable, str(ROOT / "launch/submit.py"), *arguments, f"run_dir={run_dir}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {result.returncode}\n{(result.stdout + result.stderr)[-3000:]}")


def row(curves: list[Curve]) -> str:
    """Return the table's line for one recipe on one backend."""
    first = curves[0]
    before, after = ([curve.points[i][1] for curve in curves] for i in (0, -1))
    ends = " ".join(f"{a:.3f}→{b:.3f}" for a, b in zip(before, after, strict=True))
    change = f"{statistics.mean(before):.3f} → {statistics.mean(after):.3f}"
    return f"| {first.recipe} | {LABELS[first.backend]} | {first.metric} | {first.points[-1][0]} | {change} | {ends} |"


def draw(curves: list[Curve], path: Path) -> None:
    names = sorted({curve.recipe for curve in curves})
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for name, axis in zip(names, axes.flat, strict=False):
        for curve in curves:
            if curve.recipe == name:
                color = "tab:blue" if curve.backend == "dtensor" else "tab:orange"
                label = LABELS[curve.backend] if curve.seed == min(c.seed for c in curves) else None
                axis.plot(*zip(*curve.points, strict=True), color=color, alpha=0.7, marker=".", label=label)
                axis.set_title(f"{name}: {curve.metric}", fontsize=9)
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


@dataclass(frozen=True)
class Request:
    """The command line's arguments."""

    recipe: Annotated[list[str], Key("NAME", "a recipe; default: every tiny one", bare=True)] = field(default_factory=recipes)
    seeds: Annotated[int, Key("N", "how many; default: 3")] = 3
    backends: Annotated[str, Key("NAME,NAME", "default: dtensor,megatron")] = "dtensor,megatron"
    executor: Annotated[str, Key("NAME", "local or slurm; default: local")] = "local"
    folder: Annotated[Path, Key("DIR", "of the runs and the picture; default: .bench/curves")] = Path(".bench/curves")
    overrides: Annotated[list[str], Key("key=value", "a key of every recipe", others=True)] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    return command_line.run(__doc__, Request, compare, arguments)


def compare(request: Request) -> int:
    seeds, folder = range(1, request.seeds + 1), request.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Curve] = []
    print("| recipe | backend | metric | steps | mean | each seed |\n|---|---|---|---|---|---|", flush=True)
    failed = 0
    for name in request.recipe:
        for backend in request.backends.split(","):
            if backend == "megatron" and config.load(name).policy.dtensor_cfg.enabled:
                continue  # LoRA is FSDP2's
            try:
                curves = [run(name, backend, seed, request.executor, folder, request.overrides) for seed in seeds]
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"| {name} | {LABELS[backend]} | FAILED: see below |", flush=True)
                print(error, file=sys.stderr, flush=True)
                failed = 1
                continue
            print(row(curves), flush=True)
            found += curves
    if found:
        draw(found, folder / "curves.png")
        print(f"\n{folder / 'curves.png'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
