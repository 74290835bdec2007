"""The process beside rank 0: killed, hanging, without its parent, beside another attempt's; rank 0 does not notice."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import config
from pipeline.trackers import TRACKERS
from pipeline.tracking import supervision
from pipeline.tracking.feed import Feed
from pipeline.tracking.position import FOLDER, run_id
from pipeline.tracking.supervision import TrackerProcess
from pipeline.tracking.tracking_process import alone
from tests.tracking.endpoint import EndpointConfig, EndpointTracker, serving
from tests.tracking.runs import ROOT, Writer, ask, begin, command, expected, made

PATIENCE_S = 120


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(supervision, "POLL_S", 0.05)
    with serving() as served:
        yield served


def started(folder):
    return TrackerProcess(command("tests.tracking.endpoint", folder), folder, folder / "attempts/1-0")


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps(endpoint, folder):
    return [step for step, *_ in endpoint.steps[run_id(folder)]]


def test_a_killed_process_starts_again_and_sends_each_step_once(tmp_path, endpoint, caplog):
    folder = made(tmp_path / "run")
    ask(folder, endpoint.address)
    process, writer = started(folder), Writer(folder)
    for last in (3, 5):
        writer.steps(last)
        until(lambda last=last: steps(endpoint, folder)[-1:] == [last])
        os.kill(endpoint.pids[-1], signal.SIGKILL)
    writer.steps(8)
    process.stop(PATIENCE_S)
    assert {step: values for step, _, values in endpoint.steps[run_id(folder)]} == expected(folder)
    assert steps(endpoint, folder) == list(range(1, 9)) and len(set(endpoint.pids)) == 3
    assert caplog.text.count("ended (SIGKILL); it starts again") == 2


def test_a_process_that_hangs_starts_again(tmp_path, endpoint, caplog, monkeypatch):
    monkeypatch.setenv("TEST_HANG_S", "0.2")
    folder = made(tmp_path / "run")
    ask(folder, endpoint.address)
    endpoint.fault = "hang"
    Writer(folder).steps(3)
    process = started(folder)
    until(lambda: "ended (exit status 3)" in caplog.text)
    endpoint.fault = ""
    endpoint.go_on.set()
    until(lambda: steps(endpoint, folder) == [1, 2, 3])
    process.stop(PATIENCE_S)
    assert "trackers: the endpoint did not answer" in caplog.text  # rank 0's log


def test_a_run_ends_while_the_endpoint_hangs(tmp_path, endpoint, caplog, monkeypatch):
    """It waits a bounded time. What it left is sent afterwards."""
    monkeypatch.setenv("TEST_FINISH_S", "0.2")
    folder = made(tmp_path / "run")
    ask(folder, endpoint.address)
    endpoint.fault = "hang"
    process = started(folder)
    endpoint.asked.acquire()
    Writer(folder).steps(3)
    process.stop(PATIENCE_S)
    assert not process.is_alive() and "lack the last steps" in caplog.text
    endpoint.fault = ""
    endpoint.go_on.set()
    monkeypatch.setitem(TRACKERS, "endpoint", EndpointTracker)
    (folder / "recipe.yaml").write_text((made(tmp_path / "like") / "recipe.yaml").read_text())
    recipe = config.read(folder / "recipe.yaml")
    recipe.logger.endpoint = EndpointConfig(endpoint.address)
    Feed("endpoint", recipe, folder).look(True)
    assert steps(endpoint, folder) == [1, 2, 3]


def test_what_a_tracker_lacks_is_in_the_log_of_rank_0(tmp_path, caplog, monkeypatch):
    """The process is started as a rank does. Nobody listens on the port; without MLflow, its module is missing."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = made(tmp_path / "run", "logger.mlflow_enabled=true", "logger.mlflow.tracking_uri=http://127.0.0.1:1")
    process = supervision.start(config.read(folder / "recipe.yaml"), folder, folder / "attempts/1-0")
    assert process
    until(lambda: "trackers: MLflow" in caplog.text)
    process.stop(PATIENCE_S)
    lines = [line for line in (folder / "attempts/1-0" / supervision.LOG).read_text().splitlines() if "MLflow" in line]
    assert re.fullmatch(
        r"\S+ \S+ WARNING \S+ MLflow: the module mlflow is missing.*|\S+ \S+ WARNING \S+ MLflow takes no.*", lines[0]
    )


def test_a_process_whose_rank_is_killed_sends_the_last_steps_and_ends(tmp_path, endpoint):
    folder = made(tmp_path / "run")
    ask(folder, endpoint.address)
    endpoint.fault = "500"
    rank = f"""
import os, signal, sys, time
from pathlib import Path
from pipeline.tracking.supervision import TrackerProcess
from tests.tracking.runs import command
folder = Path({str(folder)!r})
TrackerProcess(command("tests.tracking.endpoint", folder), folder, folder / "attempts/1-0")
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", rank], cwd=ROOT, stdin=subprocess.PIPE)
    endpoint.asked.acquire()  # it runs
    Writer(folder).steps(3)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    endpoint.fault = ""
    until(lambda: steps(endpoint, folder) == [1, 2, 3])
    with alone(folder / FOLDER, PATIENCE_S) as ended:
        assert ended


def test_the_process_of_a_later_attempt_takes_over(tmp_path, endpoint):
    folder = made(tmp_path / "run")
    ask(folder, endpoint.address)
    Writer(folder).steps(3)
    first = started(folder)
    until(lambda: steps(endpoint, folder) == [1, 2, 3])
    begin(folder, "1-1")
    second = started(folder)
    Writer(folder, after=2, times=2).steps(5)
    until(lambda: steps(endpoint, folder) == [1, 2, 3, 4, 5])
    until(lambda: not first.is_alive())
    second.stop(PATIENCE_S)
    assert steps(endpoint, folder) == [1, 2, 3, 4, 5] and len(set(endpoint.pids)) == 2


def test_restarts_are_bounded(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(supervision, "POLL_S", 0.001)
    monkeypatch.setattr(supervision, "RESTARTS", 3)
    process = TrackerProcess(["false"], tmp_path, tmp_path)
    until(lambda: not process.is_alive())
    assert caplog.text.count("starts again") == 3 and "launch/track.py" in caplog.text
    missing = TrackerProcess([str(tmp_path / "no-such-program")], tmp_path, tmp_path)
    until(lambda: not missing.is_alive())
    assert "FileNotFoundError" in caplog.text


def test_a_recipe_without_trackers_starts_no_process(tmp_path):
    assert supervision.start(config.read(made(tmp_path / "run") / "recipe.yaml"), tmp_path, Path("attempts/1-0")) is None
