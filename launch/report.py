"""What came of a run: accuracy before and after, three samples, and the curves as a picture.

    python launch/report.py RUN_DIR [RUN_DIR ...]

Reads metrics.jsonl and the rollouts; writes curves.png into each run folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CURVES = (
    ("reward", ("train/reward", "val/reward")),
    ("accuracy", ("train/accuracy", "val/accuracy")),
    ("loss", ("train/loss", "val/loss")),
    ("completion tokens", ("train/completion_tokens", "val/completion_tokens")),
    ("seconds per step", ("time/rollout", "time/train", "time/refit", "time/step")),
    ("generate against train log-probs", ("train/gen_logprob_error_max",)),
)


def main(run_dirs: list[str]) -> int:
    if not run_dirs:
        print(__doc__, file=sys.stderr)
        return 2
    for run_dir in map(Path, run_dirs):
        try:
            lines = _read(run_dir / "metrics.jsonl")
        except FileNotFoundError:
            print(f"error: {run_dir} is not a run folder: it has no metrics.jsonl", file=sys.stderr)
            return 2
        if not lines:
            print(f"{run_dir}: no step yet")
            continue
        print(f"{run_dir}: {lines[-1]['step']} steps")
        _print_before_and_after(lines)
        _print_samples(run_dir)
        print(f"  curves: {_draw(lines, run_dir)}")
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _print_before_and_after(lines: list[dict[str, Any]]) -> None:
    for key in ("val/accuracy", "val/loss", "train/reward"):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if len(points) > 1:
            (first, before), (last, after) = points[0], points[-1]
            print(f"  {key}: {before:.3f} at step {first}, {after:.3f} at step {last}")


def _print_samples(run_dir: Path, count: int = 3) -> None:
    rollouts = sorted((run_dir / "rollouts").glob("val_*.jsonl")) or sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    if not rollouts:
        return
    print(f"  samples of {rollouts[-1].name}:")
    for record in _read(rollouts[-1])[:count]:
        print(f"    {record['prompt']!r} -> {record['completion']!r}  reward {record['reward']:g}")


def _draw(lines: list[dict[str, Any]], run_dir: Path) -> Path:
    curves = [(title, keys) for title, keys in CURVES if any(key in line for line in lines for key in keys)]
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(curves) :]:
        axis.axis("off")
    for axis, (title, keys) in zip(axes.flat, curves, strict=False):
        for key in keys:
            points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=key, marker="o" if len(points) < 10 else None, linewidth=1.2)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(run_dir.name)
    path = run_dir / "curves.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
