"""Run folders as a run writes them, and what a tracker must have of one."""

import json
import os
import sys
from collections.abc import Container
from pathlib import Path

import yaml

from pipeline.config import LoggerConfig
from pipeline.observe.metrics import Metrics, read
from tests.launch import made_runs

ROOT = Path(__file__).parents[2]


def made(path: Path, *overrides: str) -> Path:
    """A submitted run without steps, in its first attempt."""
    folder = made_runs.folder(path, "tiny_grpo", *overrides)
    begin(folder, "1-0")
    return folder


def begin(folder: Path, attempt: str) -> None:
    (folder / "attempts" / attempt).mkdir(parents=True)
    (folder / "attempts/current").write_text(attempt + "\n")


def values(step: int, times: int = 1, changed: float = 0.0) -> dict[str, float]:
    """The metrics of a step in its Nth run: a replay repeats them but for times. One is not a number."""
    told = {"train/loss": 1 / (step + 3) + changed, "train/grad_norm": 0.1 * step, "val/pass@4": step % 3 / 3}
    return told | {"train/none": float("nan"), "time/step": step + times / 10, "resources/cpu": step * 7.0 * times}


class Writer:
    """Writes metrics.jsonl as rank 0 does, of one start of the ranks."""

    def __init__(self, folder: Path, after: int | None = None, times: int = 1, changed: float = 0.0):
        self._metrics = Metrics(folder, LoggerConfig(tensorboard_enabled=False), after)
        self._step, self._times, self._changed = after or 0, times, changed

    def steps(self, last: int) -> None:
        while self._step < last:
            self._step += 1
            self._metrics.log(self._step, values(self._step, self._times, self._changed))


def expected(folder: Path, replayed: Container[int] = (), times: int = 1) -> dict[int, dict[str, float]]:
    """Return step -> values of metrics.jsonl without nulls; of replayed steps the times of an earlier run, the Nth."""
    found = {}
    for line in read(folder / "metrics.jsonl"):
        step = line["step"]
        own = {key: value for key, value in line.items() if key not in ("step", "time") and value is not None}
        if step in replayed:
            first = values(step, times)
            own |= {key: first[key] for key in ("time/step", "resources/cpu")}
        found[step] = own
    return found


def ask(folder: Path, address: str) -> None:
    """Have a run's recipe ask for the tracker of `endpoint.py`, which only its process knows."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["logger"] |= {"endpoint_enabled": True, "endpoint": {"address": address}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def command(module: str, folder: Path) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-m",
        module,
        str(folder),
        (folder / "attempts/current").read_text().strip(),
        str(os.getpid()),
    ]


def evaluated(folder: Path, step: int, score: float) -> None:
    """Write the scores of an evaluation."""
    path = folder / f"evaluations/math/step_{step:06d}/scores.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tasks": {"gsm8k": {"metrics": {"accuracy": {"value": score, "low": 0.0, "high": 1.0}}}}}))


def sampled(folder: Path, kind: str, step: int, count: int = 1) -> None:
    """Write rollouts of a step."""
    record = {"prompt_index": 3, "sample": 0, "prompt": "1+1=", "completion": "2", "reward": 1.0, "finish": "stop"}
    (folder / "rollouts").mkdir(exist_ok=True)
    (folder / f"rollouts/{kind}_{step:06d}.jsonl").write_text((json.dumps(record) + "\n") * count)
