"""Sweeps through the service: who may begin, read and cancel them, and one of trivial runs from its start to its verdict."""

import json
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from launch.governance import audit_log
from launch.serving.app import application
from launch.sweeps import suite as suites
from launch.sweeps.sweep_folder import SweepFolder, SweepJob, SweepPlan
from tests.launch import made_runs
from tests.launch.serving.team import TOKENS, bearer, settings
from tests.launch.serving.test_bad_requests import TRICKS, everything
from tests.launch.sweeps.suites import STANDIN
from tests.launch.waiting import wait_until

ID = "sam~sweeps~tiny~one"
GOOD = {"suite": "tiny", "id": "two"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return the folder of a sweep of sam's that ended before its only job was submitted."""
    root = tmp_path / "runs"
    made_runs.folder(root / "sue/second")
    path = root / "sam/sweeps/tiny/one"
    job = SweepJob("tiny_sft-1", "tiny_sft", [], str(path / "runs/tiny_sft-1"), "tiny_sft", 1)
    path.mkdir(parents=True)
    SweepFolder(path).begin(suites.load("tiny").suite, SweepPlan("one", "local", str(tmp_path), "none", [], [job]))
    (path / "sweep.log").write_text("tiny one: 1 jobs\nerror: the dog ate it\n")
    return path


@pytest.fixture
def client(folder):
    root = folder.parents[3]
    with TestClient(application(settings(root)), raise_server_exceptions=False, follow_redirects=False) as client:
        yield client


def test_a_viewer_reads_the_state_the_runs_and_the_report(client, folder):
    vera = bearer("vera")
    found = client.get(f"/api/v1/sweeps/{ID}", headers=vera).json()
    assert (found["owner"], found["state"], found["jobs"]) == ("sam", "stopped", {"tiny_sft-1": "missing"})
    assert found["why"].endswith("the dog ate it") and found["runs"] == {} and found["verdict"] is None
    assert client.get(f"/api/v1/sweeps/{ID}/report", headers=vera).status_code == 404

    made_runs.folder(folder / "runs/tiny_sft-1")
    verdict = {"passed": False, "summary": "tiny one: 1 failed", "verdicts": [], "value": float("nan")}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    (folder / "report.html").write_text("<p>the report")
    found = client.get(f"/api/v1/sweeps/{ID}", headers=vera).json()
    assert (found["state"], found["summary"], found["verdict"]["value"]) == ("failed", "tiny one: 1 failed", None)
    run = found["runs"]["tiny_sft-1"]
    assert client.get(f"/api/v1/runs/{run}", headers=vera).json()["owner"] == "sam"
    assert run in {each["id"] for each in client.get("/api/v1/runs", headers=vera).json()["runs"]}
    assert client.get(f"/api/v1/sweeps/{ID}/report", headers=vera).text == "<p>the report"
    assert f'href="/api/v1/sweeps/{ID}/report"' in client.get("/", headers=vera).text
    link = client.get(f"/api/v1/sweeps/{ID}/runs/tiny_sft-1/recipe.yaml", headers=vera)  # as in the report
    assert link.headers["location"] == f"/runs/{run}/report"
    assert client.get(f"/api/v1/sweeps/{ID}/runs/other/", headers=vera).status_code == 404
    (line,) = client.get("/api/v1/sweeps", headers=vera).json()
    assert line == {"id": ID, "owner": "sam", "state": "failed", "why": "", "summary": "tiny one: 1 failed"}


def test_a_damaged_sweep_does_not_hide_the_others(client, folder):
    other = folder.parent / "other"
    other.mkdir()
    (other / "sweep.json").write_text("{")
    states = {each["id"]: each["state"] for each in client.get("/api/v1/sweeps", headers=bearer("vera")).json()}
    assert states == {ID: "stopped", "sam~sweeps~tiny~other": "unknown"}


def test_bad_requests_are_refused_and_change_nothing(client, folder, monkeypatch):
    monkeypatch.chdir(folder)  # a sweep's folder has suite.yaml, which is no suite of recipes/sweeps
    before, base = everything(folder.parents[4]), "/api/v1/sweeps"
    reads = ("", f"/{ID}", f"/{ID}/report", f"/{ID}/plotly.min.js")

    def refused(method: str, path: str, headers: dict, body: object, *statuses: int) -> None:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = client.request(method, f"{base}{path}", headers=headers, **content)
        assert answer.status_code in statuses, (method, path, body, answer.status_code, answer.text)
        assert answer.json()["problems"]

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"hetstep_token={TOKENS['ada']}"}):
        for path in reads if "Cookie" not in headers else ():
            refused("GET", path, headers, None, 401)
        refused("POST", "", headers, GOOD, 401)
        refused("POST", f"/{ID}/cancel", headers, {}, 401)
    refused("POST", "", bearer("vera"), GOOD, 403)
    for name in ("vera", "sue"):
        refused("POST", f"/{ID}/cancel", bearer(name), {}, 403)
    for trick in (*TRICKS, "sue~second", "sam~sweeps", "sam~sweeps~tiny", "sam~sweeps~tiny~two"):
        for path in ("", "/report", "/plotly.min.js"):
            refused("GET", f"/{trick}{path}", bearer("ada"), None, 404)
        refused("POST", f"/{trick}/cancel", bearer("ada"), {}, 404)
    for wrong in ("../tiny", "/etc/passwd", "a/b", "", ".x", "tiny\n", 3, None, "nightlyy", "suite", "suite.yaml"):
        refused("POST", "", bearer("sam"), {**GOOD, "suite": wrong}, 404, 422)
    for wrong in ("../x", "a/b", "", ".x", "a~b", "x" * 65, 3, ["x"]):
        refused("POST", "", bearer("sam"), {**GOOD, "id": wrong}, 422)
    suite = str(folder / "suite")
    wrong = (
        {"folder": "/tmp"},
        {"run_dir": "/tmp"},
        {"name": "x"},
        {"runs": {"x": 1}},
        {"no_such": 1},
        {"seeds": "x"},
        [],
        "x",
    )
    for overrides in (*wrong, {"runs.tiny_sft.recipe": suite}, {"runs": {"tiny_sft": {"recipe": "suite"}}}, {"a=b": 1}):
        refused("POST", "", bearer("sam"), {**GOOD, "overrides": overrides}, 403, 404, 422)
    refused("POST", "", bearer("sam"), {**GOOD, "update_baseline": True}, 422)
    refused("POST", "", bearer("sam"), {**GOOD, "id": "one", "overrides": {"seeds": [7]}}, 409)
    for body, status in ((b"{", 422), (b"\xff", 400), (b"[]", 422), (b"x" * 70_000, 413)):
        refused("POST", "", {**bearer("sam"), "Content-Type": "application/json"}, body, status)
    refused("DELETE", f"/{ID}", bearer("ada"), None, 405)
    after = everything(folder.parents[4])
    assert {path for path in after.keys() ^ before.keys() if not path.endswith(".lock")} == set()
    assert all(after[path] == before[path] for path in before)
    with TestClient(application(settings(folder.parents[3], writable=False))) as reading:
        assert reading.post(base, json=GOOD, headers=bearer("ada")).status_code == 403
        assert reading.post(f"{base}/{ID}/cancel", headers=bearer("ada")).status_code == 403


def test_a_run_cannot_take_the_folder_of_the_sweeps(client):
    answer = client.post("/api/v1/runs", json={"recipe": "tiny_sft", "name": "sweeps"}, headers=bearer("sam"))
    assert answer.status_code == 422 and answer.json()["problems"][0]["key"] == "name"


@pytest.mark.full
def test_from_the_start_over_a_cancellation_to_the_verdict(client, folder, monkeypatch):
    for key, value in {"PYTHONPATH": str(STANDIN), "HETSTEP_TEST_TASK": "tests.launch.sweeps.tasks:learn"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("HETSTEP_TEST_SLEEP", "3600")
    sam, address = bearer("sam"), "/api/v1/sweeps/sam~sweeps~tiny~two"
    body = {**GOOD, "overrides": {"seeds": [1], "retries": 1, "cluster": {"executor": "local"}}}

    def state() -> dict:
        return client.get(address, headers=bearer("vera")).json()

    assert client.post("/api/v1/sweeps", json=body, headers=sam).json() == {"id": "sam~sweeps~tiny~two"}
    assert state()["state"] == "running"  # before its process has written anything
    wait_until(lambda: [*state()["jobs"].values()] == ["live", "live"], "both runs", 240)
    again = client.post("/api/v1/sweeps", json=body, headers=sam)
    assert (again.status_code, again.json()["problems"][0]["code"]) == (409, "in-use")
    assert client.post(f"{address}/cancel", headers=bearer("sue")).status_code == 403
    cancelled = client.post(f"{address}/cancel", headers=sam)
    assert cancelled.status_code == 200 and cancelled.json()["state"] == "cancelled", cancelled.text
    assert "live" not in cancelled.json()["jobs"].values()
    assert client.post(f"{address}/cancel", headers=sam).json()["state"] == "cancelled"
    lines = [json.loads(line) for line in (folder.parents[3] / audit_log.LOG).read_text().splitlines()]
    asked = [(line["action"], line["details"].get("requested_by")) for line in lines]
    assert asked.count(("submit", "sam")) == asked.count(("cancel", "sam")) == 2, asked

    monkeypatch.setenv("HETSTEP_TEST_SLEEP", "0")
    assert client.post("/api/v1/sweeps", json=body, headers=sam).status_code == 201
    wait_until(lambda: time.sleep(0.2) or state()["verdict"], "the verdict", 240)
    found = state()
    assert found["state"] == "failed"  # the trivial runs have no val/loss
    assert found["jobs"] == {"tiny_sft-1": "done", "tiny_sft_again-1": "done"}
    assert "as tiny_sft" in {each["gate"] for each in found["verdict"]["verdicts"] if each["outcome"] == "passed"}
    assert "tiny_sft_again" in client.get(f"{address}/report", headers=bearer("vera")).text
    assert client.get(f"{address}/plotly.min.js", headers=bearer("vera")).status_code == 200
