"""Tasks that ranks of the sweeps' tests run in place of the pipeline: a curve from the standard library, or a failure."""

import json
import os
import time
from pathlib import Path

from pipeline import config


def learn(run_dir: str) -> None:
    """Write metrics that depend on seed and learning rate.

    HETSTEP_TEST_FAILS=NAME:COUNT,...: that run fails COUNT times first.
    """
    if os.environ["HETSTEP_RANK"] != "0":
        return
    folder = Path(run_dir)
    attempt = folder / "attempts" / os.environ["HETSTEP_ATTEMPT"]
    (attempt / "nodes.json").write_text(json.dumps({"nodes": {"here": {"gpus": [], "cpu": "2 x slide rule"}}}))
    with open(folder / "starts", "a") as starts:
        starts.write(f"{os.environ['HETSTEP_ATTEMPT']}\n")
    fails = dict(each.split(":") for each in os.environ.get("HETSTEP_TEST_FAILS", "").split(",") if each)
    if len((folder / "starts").read_text().splitlines()) <= int(fails.get(folder.name, 0)):
        said = {"rank": 0, "realm": "train", "host": "here", "verb": "step", "phase": "", "message": "the dog ate it"}
        (attempt / "failure.json").write_text(json.dumps(said))
        raise SystemExit(1)
    time.sleep(float(os.environ.get("HETSTEP_TEST_SLEEP", "0")))
    recipe = config.read(folder / "recipe.yaml")
    rate, seed = recipe.policy.optimizer.kwargs["lr"], recipe.grpo.seed
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 5):
            values = {"train/loss": rate * seed / step, "train/ppo_kl": 0.0, "time/step": 0.1}
            file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
    (folder / "done.json").write_text(json.dumps({"step": 4}))
