"""The processes of parts: one worker for many, programs, and their end."""

import pytest

from tests.gpu_check import table
from tests.gpu_check.processes import Processes
from tests.gpu_check.samples import called, place, program
from tests.gpu_check.table import FAILED, PASSED
from tests.launch.waiting import alive, reports


@pytest.fixture
def processes(tmp_path):
    running = Processes(place(tmp_path))
    yield running
    running.end_worker()


def test_parts_share_a_process_until_one_fails(processes):
    pids = [processes.run(called("process"), 60).numbers["pid"] for _ in range(2)]
    failed = processes.run(called("fails"), 60)
    pids.append(processes.run(called("process"), 60).numbers["pid"])
    assert pids[0] == pids[1] != pids[2]
    assert (failed.outcome, failed.note) == (
        FAILED,
        "ValueError: wrong",
    ) and "ValueError: wrong" in processes.log + "ValueError: wrong"


def test_a_worker_that_dies_or_hangs_loses_only_its_part(processes):
    died = processes.run(called("dies"), 60)
    assert (died.outcome, died.note) == (FAILED, "its process ended with status -9")
    assert "before its end" in processes.log
    assert processes.run(called("sleep", str(processes.place.folder)), 0.5).outcome == table.LATE
    assert processes.run(called("process"), 60).outcome == PASSED


def test_a_part_of_its_own_has_a_process_of_its_own(processes):
    shared, own, later = (processes.run(called("process", alone=alone), 60).numbers["pid"] for alone in (False, True, False))
    assert len({shared, own, later}) == 3
    processes.run(program("pass"), 60)
    assert processes.run(called("process"), 60).numbers["pid"] not in (shared, own, later)


def test_what_is_printed_is_no_result(processes):
    assert processes.run(called("prints"), 60).note == "measured"
    assert "printed by Python\nprinted by C" in processes.log


def test_problems_fail_a_part_and_keep_its_numbers(processes):
    result = processes.run(called("problems"), 60)
    assert (result.outcome, result.note) == (FAILED, "high: 2, more than 1; a: KeyError: 'b'; a note")
    assert result.numbers == {"low": 0.5, "high": 2.0}


@pytest.mark.full
def test_all_processes_of_a_run_are_ended(tmp_path, processes):
    """Both those that it started in its own session and its ranks, whose controller has another."""
    text = f"""
import subprocess, sys
from pathlib import Path
from launch.executors.local import HetLocalExecutor
from launch.executors.record import JobRecord, write_record
from pipeline.config import ClusterConfig, ComponentConfig
from tests.launch import tasks
from tests.launch.waiting import reports

run_dir = Path({str(tmp_path)!r})
(run_dir / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
job = HetLocalExecutor(run_dir, ClusterConfig(time_min=20), {{"train": ComponentConfig(nodes=2)}}).submit(
    tasks.report_and_wait, str(run_dir)
)
write_record(run_dir, JobRecord.of("local", job))
reports(run_dir, 2)
"""
    assert processes.run(program(text, run_dir=tmp_path), 100).outcome == PASSED
    assert not alive(int((tmp_path / "child").read_text()))
    assert not any(alive(rank["pid"]) for rank in reports(tmp_path, 2))
