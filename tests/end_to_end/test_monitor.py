"""Runs with planted faults, which the resource monitor must find on their ranks."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, Fault, launch, pids_of, submit
from tests.end_to_end.test_async import IN_FLIGHT
from tests.launch.waiting import wait_until

FAST = ("logger.monitor.period_s=0.2",)


def warned(folder: Path) -> dict[str, set[int]]:
    """Return the ranks of each check that has warned."""
    found: dict[str, set[int]] = {}
    for path in folder.glob("attempts/*/resources/warnings.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["check"], set()).add(line["rank"])
    return found


@pytest.mark.full
def test_metrics_and_samples_of_a_run(tmp_path):
    run = submit(tmp_path / "run", *LOCAL, *FAST, "grpo.max_num_steps=3")
    assert run.status == 0, run.output
    last = read(run.folder / "metrics.jsonl")[-1]
    for component in ("train", "generate"):
        assert 0 <= last[f"resources/{component}_waiting_min"] <= last[f"resources/{component}_waiting_max"] <= 1.01
        assert last[f"resources/{component}_rss_gb_mean"] > 0.05 and last[f"resources/{component}_tflops_per_rank"] > 0
    assert last["resources/generate_rss_gb_max_rank"] in (2, 3) and "resources/train_mfu" not in last, "there is no GPU"
    for rank, component in enumerate(("train", "train", "generate", "generate")):
        (path,) = run.folder.glob(f"attempts/*/resources/rank{rank:05d}.jsonl")
        about, *samples = map(json.loads, path.read_text().splitlines())
        assert about["rank"] == rank and about["component"] == component and samples[-1]["cpu"] > samples[0]["cpu"]


@pytest.mark.long
def test_a_slow_train_rank(tmp_path):
    """Rank 1 may run one third of the time of its training steps."""
    folder = tmp_path / "run"
    process = launch(
        folder, *LOCAL, *FAST, "grpo.max_num_steps=500", fault=Fault("step", 1, actor=1, count=3, signal=signal.SIGCONT)
    )
    stopped = threading.Event()

    def slow(pid):
        while not stopped.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.2)):
                os.kill(pid, number)
                time.sleep(seconds)

    try:
        wait_until((pids_of(folder) / "done").exists, "the third training step", 300)
        threading.Thread(target=slow, args=(int((pids_of(folder) / "1").read_text()),), daemon=True).start()
        wait_until(lambda: "slow_rank" in warned(folder), "a warning", 280)
    finally:
        stopped.set()
        time.sleep(1)
        process.kill()
    assert warned(folder)["slow_rank"] == {1}


@pytest.mark.long
def test_a_leak_in_an_environment_and_a_queue_that_starves(tmp_path):
    """The environments of rank 3 keep 3 MB of each answer, and all take 0.2 s."""
    folder = tmp_path / "run"
    kind = "tests.end_to_end.environment.LeaksAndWaits"
    environment = f"env.digits={{kind: {kind}, kwargs: {{rank: 3, megabytes: 3, seconds: 0.2}}}}"
    process = launch(
        folder, *LOCAL, *FAST, *IN_FLIGHT, environment, "grpo.max_num_steps=100000", "checkpointing.save_period=1000"
    )
    try:
        wait_until(lambda: {"host_leak", "starved_queue"} <= warned(folder).keys(), "both warnings", 500)
    finally:
        process.kill()
    found = warned(folder)
    assert found["host_leak"] == {3} and found["starved_queue"] <= {0, 1}
