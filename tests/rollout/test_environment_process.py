"""Environments in a separate process: the same episodes, and the effects of its end. See environment_scenarios.py."""

import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from pipeline.rollout import environment_process
from pipeline.rollout.environment_server import frame
from tests.rollout import environment_scenarios as scenarios

SILENT = r"sent no report for 1\.5 s \(one of its calls holds Python's lock\) and was killed"
ANOTHER = "another process takes its place"


@pytest.fixture
def play(play_in, checkpoint):
    """Run a scenario with a model to its end. Return (exit status, output)."""
    return lambda scenario, *arguments: play_in(scenario, checkpoint.folder, *arguments)


@pytest.mark.parametrize(
    ("scenario", "arguments", "says"),
    [
        (scenarios.same, (), "env.naughty: train prompt 0, sample 0, turn 0 failed: reset raised OSError: no board for you"),
        (scenarios.deaths, ("kill", "was killed by SIGKILL"), ANOTHER),
        pytest.param(scenarios.deaths, ("hold", SILENT), ANOTHER, marks=pytest.mark.full),
        (scenarios.unbegun, (), f"was killed by SIGKILL while it judged 1 turns; {ANOTHER}"),
        (scenarios.suspects, (), ""),
        (scenarios.accused, ("1/2",), ""),
        pytest.param(scenarios.accused, ("3/1",), "", marks=pytest.mark.full),
        (scenarios.given_up, (), ""),
        (scenarios.worn_out, (), " calls hang at the same time, each for more than 0.3 s"),
        (scenarios.idle_deaths, (), ""),
        (scenarios.errors, (), ""),
        (scenarios.garbled, (), ""),
        (scenarios.orderly, (), "the key: ***\n"),
        pytest.param(scenarios.executed, (), "", marks=pytest.mark.full),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_scenario(play, scenario, arguments, says):
    """Each scenario holds; its docstring describes it."""
    status, printed = play(scenario, *arguments)
    assert status == 0 and says in printed, printed[-4000:]


def test_nothing_outlives_the_rank(play, tmp_path):
    """Neither the process, though none of its threads can run, nor a sandboxed program, nor its guard."""
    status, printed = play(scenarios.leave, tmp_path)
    assert status == -signal.SIGKILL, printed[-4000:]
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) >= 3  # the process, a guard, a program
    deadline = time.monotonic() + 15
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_report_that_cannot_be_decoded_is_an_error_at_once():
    ours, its = socket.socketpair()
    started = environment_process.StartedProcess(None, ours, None)
    process = environment_process._Process(started, scenarios.settings(Path(), "exact_match"), threading.Event())
    its.sendall(frame("no report"))
    report = process.reports.get(timeout=60)
    assert report.error == "ValidationError" and report.traceback
    assert process.reports.get(timeout=60) is None
    its.close()


def test_a_process_that_does_not_load_in_time_is_named(monkeypatch):
    ours, _its = socket.socketpair()
    started = environment_process.StartedProcess(Silent(), ours, None)
    monkeypatch.setattr(environment_process, "_next", lambda: started)
    process = environment_process.EnvironmentProcess(scenarios.settings(Path(), "exact_match"), threading.Event())
    with pytest.raises(RuntimeError, match=r"has not loaded .* within 0\.1 s"):
        process.wait_until_loaded(0.1)
    assert started.handle.killed


class Silent:
    killed = False

    def poll(self):
        return -signal.SIGKILL if self.killed else None

    def kill(self):
        self.killed = True

    def wait(self, timeout):
        return self.poll()


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
