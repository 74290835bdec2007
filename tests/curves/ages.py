"""Compare ages of asynchronous sampling with the synchronous run, over seeds: python -m tests.curves.ages [key=value ...]

For each seed one run without `grpo.async_grpo` and one for each age, submitted as a user would. Prints a Markdown table, means
over seeds. Runs that are complete in the folder are taken as they are. Times are of runs one after another on the same machine,
without each run's first two steps.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from launch.terminal import command_line
from launch.terminal.command_line import Key
from pipeline import config
from pipeline.observe.metrics import NOT_REPRODUCIBLE, read
from tests.curves.__main__ import submit

SYNCHRONOUS = "sync"
WARMUP = 2  # steps whose times are left out
TIMES = ("time/step", "time/rollout", "time/train", "time/refit", "idle/train", "idle/generate")


@dataclass(frozen=True)
class Runs:
    """The steps of one age, or of the synchronous runs."""

    name: str
    lines: list[list[dict[str, Any]]]  # each seed's steps

    def mean(self, key: str, after: int = 0) -> float:
        """Return the mean over the steps beyond `after` and the seeds."""
        return statistics.mean(line[key] for lines in self.lines for line in lines[after:] if line.get(key) is not None)

    def reproducible(self) -> list[list[dict[str, Any]]]:
        """Return the metrics that two runs of the same recipe share, without those that only asynchronous runs have."""
        without = (*NOT_REPRODUCIBLE, "async/")
        return [[{k: v for k, v in line.items() if not k.startswith(without)} for line in lines] for lines in self.lines]

    def last(self, key: str, steps: int = 10) -> list[float]:
        """Return each seed's mean over its last steps."""
        return [statistics.mean(line[key] for line in lines[-steps:]) for lines in self.lines]

    def tokens(self) -> dict[int, float]:
        """Return the share of tokens of each age; {0: 1} for a synchronous run."""
        found: dict[int, float] = {}
        for line in (line for lines in self.lines for line in lines):
            for key in (key for key in line if key.startswith("async/tokens_age_")):
                age = int(key.rpartition("_")[2])
                found[age] = found.get(age, 0.0) + line[key]
        drawn = sum(found.values())
        return {age: n / drawn for age, n in sorted(found.items())} or {0: 1.0}


def run(recipe: str, name: str, seed: int, folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    section = "grpo.async_grpo"
    ahead = [f"{section}.enabled=false"]
    if name != SYNCHRONOUS:
        ahead = [f"{section}.enabled=true", f"{section}.max_trajectory_age_steps={name}"]
    run_dir = folder / f"{Path(recipe).stem}-{name}-{seed}"
    submit(run_dir, [f"recipe={recipe}", "cluster.executor=local", f"grpo.seed={seed}", *ahead, *overrides])
    return [line for line in read(run_dir / "metrics.jsonl") if line["step"] > 0]


def row(runs: Runs, synchronous: Runs) -> str:
    ends = " ".join(f"{value:.3f}" for value in runs.last("train/reward"))
    ages = " ".join(f"{age}: {share:.0%}" for age, share in runs.tokens().items() if share)
    times = [runs.mean(key, WARMUP) for key in TIMES]
    faster = synchronous.mean("time/step", WARMUP) / times[0]
    shown = " | ".join(f"{value:.2f}" for value in times)
    return f"| {runs.name} | {statistics.mean(runs.last('train/reward')):.3f} ({ends}) | {ages} | {faster:.2f} | {shown} |"


@dataclass(frozen=True)
class Request:
    """The command line's arguments."""

    recipe: Annotated[str, Key("NAME", "default: tiny_async")] = "tiny_async"
    ages: Annotated[str, Key("N,N", "default: 0,1,2,4,8")] = "0,1,2,4,8"
    seeds: Annotated[int, Key("N", "how many; default: 3")] = 3
    folder: Annotated[Path, Key("DIR", "of the runs; default: .bench/ages")] = Path(".bench/ages")
    overrides: Annotated[list[str], Key("key=value", "a key of the recipe", others=True)] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    return command_line.run(__doc__, Request, compare, arguments)


def compare(request: Request) -> int:
    recipe, overrides, folder = request.recipe, request.overrides, request.folder.absolute()
    config.load(recipe, overrides)  # an error in it is raised before the first run
    names = [SYNCHRONOUS, *request.ages.split(",")]
    seeds = range(1, request.seeds + 1)
    folder.mkdir(parents=True, exist_ok=True)
    heads = ["age", "reward of the last 10 steps (seeds)", "tokens by age", "sync / step", *TIMES]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    every: list[Runs] = []
    for name in names:
        every.append(Runs(name, [run(recipe, name, seed, folder, overrides) for seed in seeds]))
        print(row(every[-1], every[0]), flush=True)
    if names[1] == "0":
        same = every[0].reproducible() == every[1].reproducible()
        print(f"\nage 0 {'is' if same else 'IS NOT'} the synchronous run to the last bit of every metric")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
