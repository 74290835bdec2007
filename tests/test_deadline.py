"""When a run leaves its allocation: by the clock, by measured times, by signals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline.config import CheckpointingConfig
from pipeline.job.deadline import Deadline
from pipeline.recipe.values import seconds

START = 1_000_000.0
HOUR = 3600.0


class Clock:
    def __init__(self):
        self.now = START

    def __call__(self) -> float:
        return self.now


def deadline(clock, *history, ends=None, received=()):
    """Return a deadline for an allocation of one hour."""
    return Deadline(START, {"the allocation": START + HOUR} if ends is None else ends, history, lambda: list(received), clock)


def leaves_at(clock, asked) -> float:
    """Return the seconds before the end of the hour from which the answer is to leave."""
    low, high = 0.0, HOUR
    while high - low > 1e-3:
        clock.now = START + (low + high) / 2
        low, high = (low, clock.now - START) if asked.why_leave() else (clock.now - START, high)
    return HOUR - high


def test_the_longest_step_the_longest_save_and_a_margin_must_fit():
    clock = Clock()
    asked = deadline(clock)
    for step_s, save_s in ((100, 30), (200, 50), (150, 10)):
        asked.record_step({"time/step": float(step_s)})
        asked.record_save(float(save_s))
    assert leaves_at(clock, asked) == pytest.approx(1.1 * (200 + 50) + 60, abs=0.01)


def test_the_reason_names_what_ends_and_what_was_measured():
    clock = Clock()
    asked = deadline(clock, ends={"the allocation": START + HOUR, "checkpointing.checkpoint_must_save_by": START + 600})
    asked.record_step({"time/step": 100.0})
    asked.record_save(20.0)
    clock.now = START + 500
    why = "no time for another step (longest so far: 100.0 s) and a save (20.0 s)"
    assert asked.why_leave() == f"checkpointing.checkpoint_must_save_by ends in 100 s: {why}"
    clock.now = START + 601
    assert asked.why_leave() == f"checkpointing.checkpoint_must_save_by is over: {why}"


def test_validation_is_part_of_a_step():
    clock = Clock()
    asked = deadline(clock)
    asked.record_save(0.0)
    asked.record_step({"time/step": 100.0})
    asked.record_step({"time/step": 90.0, "time/validation": 60.0, "time/rollout": 80.0})
    assert leaves_at(clock, asked) == pytest.approx(1.1 * 150 + 60, abs=0.01)


def test_earlier_attempts_measurements_count_but_each_attempt_does_a_step():
    clock = Clock()
    history = [{"step": 0, "time": 5.0, "val/accuracy": 0.5}, {"step": 1, "time/step": 500.0}, {"step": 2, "time/save": 100.0}]
    asked = deadline(clock, *history)
    clock.now = START + HOUR
    assert asked.why_leave() is None
    asked.record_step({"time/step": 10.0})
    assert leaves_at(clock, asked) == pytest.approx(1.1 * 600 + 60, abs=0.01)


def test_a_save_that_was_never_measured_counts_as_long():
    clock = Clock()
    asked = deadline(clock)
    asked.record_step({"time/step": 10.0})
    assert leaves_at(clock, asked) == pytest.approx(1.1 * (10 + 360) + 60, abs=0.01)


def test_the_margin_of_a_short_allocation_is_a_share_of_it():
    clock = Clock()
    asked = deadline(clock, ends={"the allocation": START + 100})
    asked.record_step({"time/step": 10.0})
    asked.record_save(10.0)
    clock.now = START + 100 - (22 + 5) - 0.1
    assert asked.why_leave() is None
    clock.now += 0.2
    assert asked.why_leave()


def test_without_an_end_only_signals_count():
    clock = Clock()
    asked = deadline(clock, ends={})
    asked.record_step({"time/step": 1e9})
    assert asked.why_leave() is None


def test_a_signal_before_the_first_step_counts_too():
    assert deadline(Clock(), received=["SIGUSR2"]).why_leave() == "SIGUSR2 came"
    assert deadline(Clock(), received=["SIGUSR2", "SIGTERM"]).why_leave() == "SIGUSR2 and SIGTERM came"


@pytest.mark.parametrize(
    ("end", "must_save_by", "what"),
    [
        (f"{START + 900:.0f}", None, "the allocation"),
        (f"{START + 900:.0f}", "00:00:10:00", "checkpointing.checkpoint_must_save_by"),
        (f"{START + 900:.0f}", "00:00:20:00", "the allocation"),
        ("", "00:00:10:00", "checkpointing.checkpoint_must_save_by"),
    ],
)
def test_the_earlier_end_counts_and_the_attempt_records_its_start(tmp_path, monkeypatch, end, must_save_by, what):
    monkeypatch.setenv("HETSTEP_END_TIME", end)
    (tmp_path / "started").write_text(f"{START}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "time/step": 7.0}) + "\n")
    asked = Deadline.of_attempt(CheckpointingConfig(checkpoint_must_save_by=must_save_by), tmp_path, tmp_path)
    asked.record_step({"time/step": 1.0})
    assert asked.why_leave().startswith(f"{what} is over: no time for another step (longest so far: 7.0 s")


def test_durations():
    assert seconds("00:03:45:00") == 13500
    assert seconds("1:0:0:1") == 86401
    for wrong in ("03:45:00", "1:2:3:4:5", "a:b:c:d", "0:0:-1:0", "13500", "0:0:1.5:0", ""):
        with pytest.raises(ValueError, match="days:hours:minutes:seconds"):
            seconds(wrong)


# ---- signals --------------------------------------------------------------------------------------------------------------

STUCK = """
import ctypes, sys, threading, time
from pipeline.job import signals
signals.install(int(sys.argv[1]))
def watch():
    while not (came := signals.received_names()):
        time.sleep(0.01)
    print(came, signals.terminating(), flush=True)
threading.Thread(target=watch, daemon=True).start()
print("ready", flush=True)
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second never returns: the main thread runs no Python any more, as in a collective
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(
    ("rank", "sent", "came"),
    [
        (0, [signal.SIGUSR2], "['SIGUSR2'] False"),
        (0, [signal.SIGTERM], "['SIGTERM'] True"),
        (1, [signal.SIGUSR2, signal.SIGTERM], "['SIGTERM'] True"),  # ignores the first
    ],
)
def test_a_signal_is_seen_while_the_main_thread_is_stuck(rank, sent, came):
    command = [sys.executable, "-c", STUCK, str(rank)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for number in sent:
            os.kill(process.pid, number)
        assert process.stdout.readline() == f"{came}\n"
        process.kill()


WATCHING = """
import sys, time
from pathlib import Path
from pipeline.job import signals
signals.WATCH_S = 0.01
signals.install(0)
signals.watch(Path(sys.argv[1]))
print("ready", flush=True)
while len(came := signals.received_names()) < int(sys.argv[2]):
    time.sleep(0.01)
print(came, signals.terminating(), flush=True)
"""


def test_a_signal_that_the_launcher_took_is_read_from_its_file(tmp_path):
    """The file grows; an incomplete line does not count yet, nor does a line that names no signal."""
    told = tmp_path / "signals"
    told.write_text("SIGKILL\nnonsense\n")
    with subprocess.Popen([sys.executable, "-c", WATCHING, str(told), "2"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for piece in ("SIGUSR2\n", "SIGT", "ERM\nSIGUSR2\n"):
            with open(told, "a") as file:
                file.write(piece)
            time.sleep(0.05)
        assert process.stdout.readline() == "['SIGUSR2', 'SIGTERM'] True\n"


def test_a_missing_launcher_file_is_looked_for_again(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WATCHING, str(tmp_path / "signals"), "1"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        (tmp_path / "signals").write_text("SIGTERM\n")
        assert process.stdout.readline() == "['SIGTERM'] True\n"


FORKED = """
import multiprocessing, signal, time
from pipeline.job import signals
signals.install(0)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
child.terminate()
child.join()
print(child.exitcode == -signal.SIGTERM, signals.received_names())
"""


def test_the_end_of_a_forked_process_is_not_the_ranks():
    """Environments end such processes when they take too long."""
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "True []\n", ended.stderr
