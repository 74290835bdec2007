"""Write run folders as a run leaves them, with the code that runs use where it exists."""

import json
import math
import os
import time
from pathlib import Path

import numpy as np

from launch.executors.local import start_time
from launch.executors.record import JobRecord, write_record
from launch.runs.run_setup import append_manifest
from pipeline import config
from pipeline.config import LoggerConfig
from pipeline.observe.metrics import Metrics
from pipeline.observe.rollout_metrics import rollout_metrics
from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Turn, VersionSpan


class Texts:
    """A tokenizer stand-in: token i is the i-th text."""

    def __init__(self, *texts: str):
        self.texts = texts

    def decode(self, tokens) -> str:
        return "".join(self.texts[int(token)] for token in tokens)


def folder(path: Path, recipe: str = "tiny_grpo", *overrides: str) -> Path:
    """Write a submitted run: recipe.yaml, manifest.json, and a job.json whose local job ended without output."""
    path.mkdir(parents=True)
    config.write(config.load(recipe, [f"run_dir={path}", *overrides]), path / "recipe.yaml")
    append_manifest(path, "local", "1", ["python", "launch/submit.py", f"recipe={recipe}"])
    write_record(path, JobRecord.of("local", Ended()))
    return path


class Ended:
    job_id = "1"
    start_time = -1  # no process has begun then


class Alive:
    """This process, as a run's job."""

    job_id = str(os.getpid())
    start_time = start_time(os.getpid())


def attempt(run: Path, name: str, started: float, verdict: str | None = None, failure: dict | None = None, log="") -> Path:
    """Write the folder of an attempt.

    started: unix seconds. log: of rank 0.
    """
    path = run / "attempts" / name
    path.mkdir(parents=True)
    (path / "started").write_text(f"{started}\n")
    (path / "rank00000.log").write_text(log)
    if failure:
        (path / "failure.json").write_text(json.dumps(failure))
    if verdict:
        (path / "verdict").write_text(verdict + "\n")
    return path


def group(index: int, prompt: int, completions: list[list[int]], rewards: list[float]) -> RolloutGroup:
    """Return one prompt of one token with completions given by their tokens; completions of three tokens are truncated."""
    rollouts = tuple(
        Rollout((Turn(_completion(f"{index}/{i}", tokens)),), reward, {"accuracy": float(reward > 0)})
        for i, (tokens, reward) in enumerate(zip(completions, rewards, strict=True))
    )
    return RolloutGroup(Prompt(index, np.array([prompt], np.int32), "addition", {"answer": "7"}), rollouts)


def _completion(name: str, tokens: list[int]) -> Completion:
    count = len(tokens)
    finish = "length" if count == 3 else "stop"
    return Completion(name, np.array(tokens, np.int32), np.zeros(count, np.float32), (VersionSpan(4, count),), finish)


def steps(
    run: Path, first: int, last: int, tokenizer: Texts, validated: int = 2, restored: int | None = None, **values: float
) -> None:
    """Write what GRPO's steps first..last leave: metrics and rollouts. `values` go into each step's line, as `train/<name>`."""
    metrics = Metrics(run, LoggerConfig(tensorboard_enabled=False), after_step=restored)
    for step in range(first, last + 1):
        groups = [group(i, 0, [[1], [1, 2], [1, 2, 3]], [0.0, 1.0, 1.0 if step % 2 else 0.0]) for i in range(4)]
        line = rollout_metrics("train", groups) | {f"train/{name}": value for name, value in values.items()}
        line |= {"train/ratio_min": 0.9, "train/ratio_max": 1.1, "train/grad_norm": math.nan if step == 3 else 1.0}
        line |= {"time/rollout": 0.2, "time/train": 0.3, "time/refit": 0.1, "time/step": 0.65}
        line |= {"refit/bytes_sent": 2e6, "throughput/refit_efficiency": 0.5, "throughput/tokens_per_s": 1000.0}
        if step % validated == 0:
            metrics.log_rollouts(step, groups, tokenizer, kind="val")
            line |= rollout_metrics("val", groups) | {"time/validation": 0.4}
        metrics.log_rollouts(step, groups, tokenizer)
        metrics.log(step, line)
    metrics.close()


def ended(run: Path, step: int) -> None:
    (run / "done.json").write_text(json.dumps({"step": step}))


def ago(seconds: float) -> float:
    return time.time() - seconds
