"""Environments in a process of their own: the same episodes, and what its end costs. See environment_scenarios.py."""

import signal
import time
from pathlib import Path

import pytest

from tests.rollout import environment_scenarios as scenarios

SILENT = r"said nothing for 1\.5 s \(a call of it holds Python's lock\), and was killed"


@pytest.fixture
def play(play_in, checkpoint):
    """Run a scenario with a model to its end; (exit status, what was printed)."""
    return lambda scenario, *arguments: play_in(scenario, checkpoint.folder, *arguments)


def test_episodes_are_the_same_to_the_bit_as_in_threads(play):
    status, printed = play(scenarios.same)
    assert status == 0, printed[-4000:]
    assert "hetstep: env.naughty: train prompt 0, sample 0, turn 0 failed: reset raised OSError: no board for you" in printed


@pytest.mark.parametrize(("way", "why"), [("kill", "was killed by SIGKILL"), ("hold", SILENT)])
def test_the_end_of_the_process_costs_what_it_judged_and_held(play, way, why):
    status, printed = play(scenarios.deaths, way, why)
    assert status == 0, printed[-4000:]
    assert "another process takes its place" in printed


def test_turns_that_had_not_begun_are_judged_by_the_next_process(play):
    status, printed = play(scenarios.unbegun)
    assert status == 0, printed[-4000:]
    assert "was killed by SIGKILL while it judged 1 turns; another process takes its place" in printed


def test_of_answers_that_a_process_died_with_those_are_wrong_that_it_died_of(play):
    status, printed = play(scenarios.suspects)
    assert status == 0, printed[-4000:]


@pytest.mark.parametrize("deadly", ["1/2", "3/1"])
def test_turns_that_cannot_be_judged_again(play, deadly):
    status, printed = play(scenarios.accused, deadly)
    assert status == 0, printed[-4000:]


def test_a_call_that_was_given_up_costs_no_other_answer(play):
    status, printed = play(scenarios.given_up)
    assert status == 0, printed[-4000:]


def test_calls_that_hang_wear_out_the_process_and_not_the_run(play):
    status, printed = play(scenarios.worn_out)
    assert status == 0, printed[-4000:]
    assert " calls of it hang at once, each for more than 0.3 s" in printed


def test_a_process_that_cannot_live_ends_the_run(play):
    status, printed = play(scenarios.idle_deaths)
    assert status == 0, printed[-4000:]


def test_errors_of_environments_are_the_ranks(play):
    status, printed = play(scenarios.errors)
    assert status == 0, printed[-4000:]


def test_signals_to_leave_do_not_end_it_and_close_does(play, tmp_path):
    status, printed = play(scenarios.orderly, tmp_path / "closed")
    assert status == 0, printed[-4000:]
    assert "the key: ***\n" in printed


def test_nothing_outlives_the_rank(play, tmp_path):
    """Not the process, though no thread of it can run, nor what guards a program in the sandbox, nor the program."""
    status, printed = play(scenarios.leave, tmp_path)
    assert status == -signal.SIGKILL, printed[-4000:]
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) >= 3  # the process, a guard, a program
    deadline = time.monotonic() + 15
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.full
def test_it_is_a_program_where_it_cannot_be_a_fork(play):
    status, printed = play(scenarios.executed)
    assert status == 0, printed[-4000:]
