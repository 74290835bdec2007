"""Refused requests are lines of the audit log, but not so many that they fill a disk."""

import json
import os
import subprocess
import sys

from fastapi.testclient import TestClient

from launch.executors.executor import ROOT
from launch.governance import audit_log
from launch.serving.app import application
from launch.serving.refusals import RefusalLog
from tests.launch import made_runs
from tests.launch.serving.team import bearer, settings


def lines(root) -> list[dict]:
    return [json.loads(line) for line in (root / audit_log.LOG).read_text().splitlines()]


def test_refused_requests_are_recorded(tmp_path):
    made_runs.folder(tmp_path / "sue/second")
    log = RefusalLog(tmp_path)
    with TestClient(application(settings(tmp_path), log.record)) as client:
        client.get("/api/v1/runs", headers={"Authorization": "Bearer wrong"})
        client.post("/api/v1/runs/sue~second/cancel", headers=bearer("sam"))
        client.post("/login", data={"token": "wrong"})
    log.wait(60)
    unknown, others, signing_in = [line["details"] for line in lines(tmp_path)]
    assert (unknown["requested_by"], unknown["request"]) == (None, "GET /api/v1/runs")
    assert (others["requested_by"], others["request"]) == ("sam", "POST /api/v1/runs/sue~second/cancel")
    assert "a run of sue" in others["why"]
    assert (signing_in["requested_by"], signing_in["request"]) == (None, "POST /login")


def test_a_flood_is_counted(tmp_path):
    log = RefusalLog(tmp_path, max_lines=3)
    for i in range(10):
        log.record("", f"GET /{i}", "no token")
    log._begun -= 3600  # later
    log.record("sam", "GET /late", "no role")
    log.wait(60)
    assert [line["details"]["not_recorded_before"] for line in lines(tmp_path)] == [0, 0, 0, 7]


def test_a_line_names_the_user_of_the_service(tmp_path):
    token = audit_log.requested_by.set("sam")
    try:
        audit_log.record("submit", tmp_path / "run", {}, tmp_path)
    finally:
        audit_log.requested_by.reset(token)
    audit_log.record("submit", tmp_path / "run", {}, tmp_path)
    first, second = lines(tmp_path)
    assert first["details"] == {"requested_by": "sam"} and second["details"] == {}


def test_a_process_that_a_request_starts_names_the_user_too(tmp_path):
    token = audit_log.requested_by.set("sam")
    try:
        environment = audit_log.environment()
    finally:
        audit_log.requested_by.reset(token)
    program = "import sys; from pathlib import Path; from launch.governance import audit_log; "
    program += "audit_log.record('export', 'x', {}, Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, cwd=ROOT)
    assert [line["details"] for line in lines(tmp_path)] == [{"requested_by": "sam"}]
    assert audit_log.environment() == os.environ
