"""Tasks that ranks of the sweeps' tests run in place of the pipeline: curves that depend on the learning rate, or a failure.

HETSTEP_TEST_FAILS=NAME:COUNT,...: the run in the folder NAME fails COUNT times first.
"""

import json
import os
import time
from pathlib import Path

from pipeline import config
from tests.launch.waiting import wait_until

STEPS = 4
ASKED_S = 120.0  # a run that nobody asks to stop fails after this


def learn(run_dir: str) -> None:
    """Write metrics that depend on seed and learning rate."""
    if os.environ["HETSTEP_RANK"] != "0":
        return
    folder, attempt = _begun(run_dir)
    (attempt / "nodes.json").write_text(json.dumps({"nodes": {"here": {"gpus": [], "cpu": "2 x slide rule"}}}))
    time.sleep(float(os.environ.get("HETSTEP_TEST_SLEEP", "0")))
    recipe = config.read(folder / "recipe.yaml")
    rate, seed = recipe.policy.optimizer.kwargs["lr"], recipe.grpo.seed
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, STEPS + 1):
            values = {"train/loss": rate * seed / step, "train/ppo_kl": 0.0, "time/step": 0.1}
            file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
    (folder / "done.json").write_text(json.dumps({"step": STEPS}))


def climb(run_dir: str) -> None:
    """Write train/reward = rate * step. A rate below 1 waits at step 2 for the request to stop, and never completes."""
    if os.environ["HETSTEP_RANK"] != "0":
        return
    folder, attempt = _begun(run_dir)
    rate = config.read(folder / "recipe.yaml").policy.optimizer.kwargs["lr"]
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({"step": step, "time": time.time(), "train/reward": rate * step, "time/step": 2.0}) + "\n")
            file.flush()
            if step == 2 and rate < 1:
                wait_until((attempt / "stop").exists, "the request to stop", ASKED_S)
                raise SystemExit(1)
    time.sleep(float(os.environ.get("HETSTEP_TEST_SLEEP", "0")))
    (folder / "done.json").write_text(json.dumps({"step": STEPS}))


def _begun(run_dir: str) -> tuple[Path, Path]:
    """Record the start of a run in its file `starts`, let it fail if it should, and return (its folder, its attempt's)."""
    folder = Path(run_dir)
    attempt = folder / "attempts" / os.environ["HETSTEP_ATTEMPT"]
    with open(folder / "starts", "a") as starts:
        starts.write(f"{os.environ['HETSTEP_ATTEMPT']}\n")
    fails = dict(each.split(":") for each in os.environ.get("HETSTEP_TEST_FAILS", "").split(",") if each)
    if len((folder / "starts").read_text().splitlines()) <= int(fails.get(folder.name, 0)):
        said = {"rank": 0, "realm": "train", "host": "here", "verb": "step", "phase": "", "message": "the dog ate it"}
        (attempt / "failure.json").write_text(json.dumps(said))
        raise SystemExit(1)
    return folder, attempt
