"""Run a curve that rises with the learning rate in place of the pipeline, as ranks of the search's tests."""

import json
import os
import time
from pathlib import Path

from pipeline import config

STEPS = 4
ASKED_S = 120.0  # a run that nobody asks to stop fails after this


def climb(run_dir: str) -> None:
    """Write train/reward = rate * step. A rate below 1 waits at step 2 for the request to stop, and never completes.

    HETSTEP_TEST_FAILS=RATE: the run with this rate fails.
    """
    if os.environ["HETSTEP_RANK"] != "0":
        return
    folder = Path(run_dir)
    attempt = folder / "attempts" / os.environ["HETSTEP_ATTEMPT"]
    with open(folder / "starts", "a") as starts:
        starts.write(f"{os.environ['HETSTEP_ATTEMPT']}\n")
    rate = config.read(folder / "recipe.yaml").policy.optimizer.kwargs["lr"]
    if str(rate) == os.environ.get("HETSTEP_TEST_FAILS"):
        said = {"rank": 0, "realm": "train", "host": "here", "verb": "step", "phase": "", "message": "the dog ate it"}
        (attempt / "failure.json").write_text(json.dumps(said))
        raise SystemExit(1)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({"step": step, "time": time.time(), "train/reward": rate * step, "time/step": 2.0}) + "\n")
            file.flush()
            if step == 2 and rate < 1:
                _wait_to_be_asked(attempt)
    time.sleep(float(os.environ.get("HETSTEP_TEST_SLEEP", "0")))
    (folder / "done.json").write_text(json.dumps({"step": STEPS}))


def _wait_to_be_asked(attempt: Path) -> None:
    deadline = time.monotonic() + ASKED_S
    while not (attempt / "stop").exists():
        assert time.monotonic() < deadline, "nobody asked the run to stop"
        time.sleep(0.05)
    raise SystemExit(1)
