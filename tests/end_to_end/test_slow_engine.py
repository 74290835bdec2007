"""An asynchronous run with an engine that is slow, that pauses, and that is killed, in numbers.

`pytest -s -m long tests/end_to_end/test_slow_engine.py` prints them.
"""

import os
import signal
import statistics
import threading
import time

import pytest

from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, Fault, Run, launch, pids_of, printed, submit
from tests.end_to_end.test_async import IN_FLIGHT, trained_on
from tests.launch.waiting import wait_until

STEPS = 12
SHAPE = (*LOCAL, *IN_FLIGHT, f"grpo.max_num_steps={STEPS}", "grpo.async_grpo.stragglers=keep", "checkpointing.save_period=3")
LONG = ("policy.generation.max_num_seqs=4", "policy.generation.max_new_tokens=30")
ENGINE = 3  # its rank; rank 2 is the other engine

pytestmark = pytest.mark.long


def whole(run: Run) -> list[dict]:
    """Return the steps of a run in which each group was trained on once, in time."""
    assert run.status == 0, run.output
    assert trained_on(run.folder) == {(prompt, sample): 1 for prompt in range(4 * STEPS) for sample in range(4)}
    lines = read(run.folder / "metrics.jsonl")
    assert max(line["async/age_max"] for line in lines) <= 2
    return lines


def run_disturbed(folder, disturb, fault: Fault) -> Run:
    """A run, while `disturb(pid)` does something to the engine; the fault tells when that begins."""
    process = launch(folder, *SHAPE, *LONG, fault=fault)
    try:
        wait_until((pids_of(folder) / "done").exists, "the fault", 120)
        disturb(process, int((pids_of(folder) / str(ENGINE)).read_text()))
        process.wait(240)
    finally:
        process.kill()
    return Run(folder, process.returncode, printed(folder), 0.0)


def test_a_slow_engine_is_given_less_to_do(tmp_path):
    """It may run one fifth of the time."""

    def slow(process, pid):
        def disturb():
            while process.poll() is None:
                for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        return
                    time.sleep(seconds)

        threading.Thread(target=disturb, daemon=True).start()

    lines = whole(run_disturbed(tmp_path / "run", slow, Fault("step", ENGINE, count=3, signal=signal.SIGCONT)))
    groups = [0.0, 0.0]  # by engine
    for line in lines[3:]:
        fewest = int(line["async/engine_with_fewest"])
        groups[fewest] += line["async/groups_per_engine_min"]
        groups[1 - fewest] += line["async/groups_per_engine_max"]
    print(f"\nslow: {groups[1]:g} groups by the slow engine, {groups[0]:g} by the other")
    assert groups[1] < 0.85 * groups[0]


def test_an_engine_that_stops_for_a_while_only_costs_that_while(tmp_path):
    pause = 8.0

    def stop(process, pid):
        time.sleep(pause)
        os.kill(pid, signal.SIGCONT)

    lines = whole(run_disturbed(tmp_path / "run", stop, Fault("step", ENGINE, count=9, signal=signal.SIGSTOP)))
    seconds = [line["time/step"] for line in lines]
    print(f"\nstopped for {pause} s: steps took {[round(s, 2) for s in seconds]} s")
    assert sum(s > pause / 2 for s in seconds) == 1, "it costs one step its time, for a refit reaches all engines"
    assert max(seconds) < pause + 10 * statistics.median(seconds)


def test_a_killed_engine_ends_the_run_and_the_next_start_keeps_finished_rollouts(tmp_path):
    broken = submit(tmp_path / "run", *SHAPE, *LONG, fault=Fault("step", ENGINE, count=11))
    why = f"rank {ENGINE} (generate) was ended by SIGKILL"
    assert broken.status == 1 and why in broken.output
    lines = whole(submit(tmp_path / "run", *SHAPE, *LONG))
    resumed = next(line for line in lines if line["step"] == 4)
    kept = {key: value for key, value in resumed.items() if key.startswith("async/resumed_")}
    print(f"\nkilled at step 6: {why}; after checkpoint 3: {kept}")
    assert kept["async/resumed_rollouts_kept"] > 0
