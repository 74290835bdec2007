"""Check that judges give the same episodes, and what happens as they end. See judge_scenarios.py."""

import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pipeline.rollout.judges import parent_process, pool
from pipeline.rollout.judges.judge_process import frame
from tests.launch.waiting import alive
from tests.rollout import judge_scenarios as scenarios

ANOTHER = "another process takes its place"


@pytest.fixture
def play(play_in, checkpoint):
    """Run a scenario with a model to its end. Return (exit status, output)."""
    return lambda scenario, *arguments: play_in(scenario, checkpoint.folder, *arguments)


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        (scenarios.same, ""),
        (scenarios.naughty, "env.naughty: train prompt 0, sample 0, turn 0 failed: reset raised OSError: no board for you"),
        (scenarios.episodes, "broke its environment and counts as wrong: its judge was killed by SIGKILL"),
        (scenarios.shared, ""),
        (scenarios.threaded, ""),
        (scenarios.stained, ""),
        (scenarios.lost, f"was killed by SIGKILL while it judged 0 turns; {ANOTHER}"),
        (scenarios.deadly, f"was killed by SIGKILL while it judged 1 turns; {ANOTHER}"),
        (scenarios.deadly_among_others, ""),
        (scenarios.forking, ""),
        (scenarios.forgotten, ""),
        (scenarios.broken, "broken raised ValueError"),
        (scenarios.daemons, ""),
        (scenarios.hanging, ""),
        (scenarios.threaded_later, ""),
        (scenarios.idle_deaths, ""),
        (scenarios.errors, ""),
        (scenarios.garbled, ""),
        (scenarios.orderly, "the key: ***\n"),
        pytest.param(scenarios.executed, "", marks=pytest.mark.full),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_scenario(play, scenario, says):
    """Run a scenario; its docstring says what must hold."""
    status, printed = play(scenario)
    assert status == 0 and says in printed, printed[-4000:]


def test_nothing_outlives_the_rank(play, tmp_path):
    """Check that all processes end with the rank: a judge that holds the GIL, its parent, a sandboxed program, its guard."""
    status, printed = play(scenarios.leave, tmp_path)
    assert status == -signal.SIGKILL, printed[-4000:]
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) >= 4  # the process, a judge, a guard, a program
    deadline = time.monotonic() + 15
    while left := [pid for pid in pids if alive(int(pid))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_report_that_cannot_be_decoded_is_an_error_at_once():
    ours, its = socket.socketpair()
    process = parent_process.ParentProcess(0, ours)
    process.begin(scenarios.settings(Path(), "exact_match"), threading.Event())
    its.sendall(frame("no report"))
    report = process.reports.get(timeout=60)
    assert report.error == "ValidationError" and report.traceback
    assert process.reports.get(timeout=60) is None
    its.close()


def test_a_process_that_does_not_load_in_time_is_named(monkeypatch):
    ours, _its = socket.socketpair()
    with subprocess.Popen(["sleep", "1000"]) as silent:
        monkeypatch.setattr(parent_process, "_early", [parent_process.ParentProcess(silent.pid, ours)])
        judges = pool.JudgePool(scenarios.settings(Path(), "exact_match"), threading.Event())
        with pytest.raises(RuntimeError, match=r"has not loaded .* within 0\.1 s"):
            judges.wait_until_loaded(0.1)
    assert not alive(silent.pid)


def test_a_reward_model_needs_no_judge():
    chosen = scenarios.settings(Path(), "reward_model")
    judges = pool.JudgePool(chosen, threading.Event())
    judges.wait_until_loaded(0.0)
    judges.submit(scenarios.said("0", scenarios.prompts(1)[0]))
    assert judges.seconds_left() == 0.0
    assert judges.take() == [("0", pool.SCORED_ELSEWHERE)] and judges.take() == [] and judges.seconds_left() is None
    judges.close()
