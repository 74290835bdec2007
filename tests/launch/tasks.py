"""What the test jobs run: tiny functions of the standard library. They are pickled by name, so they have their own module."""

import json
import os
import time
from pathlib import Path

from pipeline import config


def report(run_dir: str) -> None:
    """Say which rank this is, and in which environment."""
    rank = int(os.environ["HETSTEP_RANK"])
    found = {key: value for key, value in os.environ.items() if key.startswith("HETSTEP_")}
    found |= {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "TEST_VAR")}
    found["pid"] = os.getpid()
    Path(run_dir, f"rank{rank}.json").write_text(json.dumps(found))
    print(f"rank {rank} says hello")


def report_and_wait(run_dir: str) -> None:
    """The same, and stay until killed."""
    report(run_dir)
    time.sleep(600)


def fail_on_rank_1(run_dir: str) -> None:
    report(run_dir)
    if os.environ["HETSTEP_RANK"] == "1":
        _wait_for_reports(run_dir)
        raise RuntimeError("rank 1 has had enough")
    time.sleep(600)


def exit_with_7_on_rank_1(run_dir: str) -> None:
    report(run_dir)
    if os.environ["HETSTEP_RANK"] == "1":
        _wait_for_reports(run_dir)
        raise SystemExit(7)
    time.sleep(600)


def _wait_for_reports(run_dir: str) -> None:
    paths = [Path(run_dir, f"rank{rank}.json") for rank in range(int(os.environ["HETSTEP_WORLD_SIZE"]))]
    while not all(path.exists() and path.read_text().endswith("}") for path in paths):
        time.sleep(0.02)


def write_steps(run_dir: str) -> None:
    """What the pipeline leaves behind for its follower: a line per step, from where it stopped, and done.json."""
    if os.environ["HETSTEP_RANK"] != "0":
        return
    last = config.read(Path(run_dir, "recipe.yaml")).grpo.max_num_steps
    metrics = Path(run_dir, "metrics.jsonl")
    first = len(metrics.read_text().splitlines()) + 1 if metrics.exists() else 1
    with open(metrics, "a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "time": time.time(), "train/reward": step / 10}) + "\n")
    Path(run_dir, "done.json").write_text(json.dumps({"step": last}))


def fail_with_report(run_dir: str) -> None:
    """Rank 1 fails as the pipeline does: it says where in failure.json."""
    if os.environ["HETSTEP_RANK"] == "1":
        said = {
            "rank": 1,
            "realm": "generate",
            "host": "here",
            "verb": "rollout",
            "phase": "step 3",
            "message": "the dog ate it",
        }
        Path(run_dir, "attempts", os.environ["HETSTEP_ATTEMPT"], "failure.json").write_text(json.dumps(said))
        raise SystemExit(1)
    time.sleep(600)
