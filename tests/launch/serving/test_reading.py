"""The service tells the same of runs as the commands."""

import json
import math
import shutil

import pytest
from fastapi.testclient import TestClient

from launch.runs import run_state, run_summary
from launch.runs.run_folder import RunFolder
from launch.runs.status_text import plain_values
from launch.serving.app import application
from launch.serving.run_cache import RunCache
from tests.launch import made_runs
from tests.launch.serving.team import TOKENS, bearer, settings


@pytest.fixture
def root(tmp_path):
    texts = made_runs.Texts("What is 3+4?", "7", "8", "9")
    for name, steps in (("sam/first", 5), ("sue/second", 3), ("third", 2)):
        run = made_runs.folder(tmp_path / name)
        made_runs.attempt(run, "a", 1.0, "stop: asked")
        made_runs.steps(run, 1, steps, texts, loss=math.nan)
    return tmp_path


@pytest.fixture
def client(root):
    with TestClient(application(settings(root)), headers=bearer("vera")) as client:
        yield client


def test_who_asks(client):
    assert client.get("/api/v1/me").json() == {"name": "vera", "role": "viewer", "writable": True}


def test_all_runs_with_their_owners(client):
    found = client.get("/api/v1/runs").json()
    assert found["total"] == 3
    assert {each["id"]: each["owner"] for each in found["runs"]} == {"sam~first": "sam", "sue~second": "sue", "third": ""}
    assert {each["id"]: each["step"] for each in found["runs"]} == {"sam~first": 5, "sue~second": 3, "third": 2}
    assert [each["id"] for each in client.get("/api/v1/runs", params={"owner": "sue"}).json()["runs"]] == ["sue~second"]
    assert client.get("/api/v1/runs", params={"state": "running"}).json()["total"] == 0
    assert len(client.get("/api/v1/runs", params={"limit": 2, "offset": 2}).json()["runs"]) == 1


def test_a_status_is_that_of_the_command(client, root):
    run = RunFolder.at(root / "sam/first")
    expected = plain_values(run_summary.full(run, run_state.state(run)))
    assert client.get("/api/v1/runs/sam~first").json() == json.loads(json.dumps(expected)) | {"id": "sam~first", "owner": "sam"}


def test_metrics_by_step(client):
    records = client.get("/api/v1/runs/sam~first/metrics").json()["records"]
    assert [each["step"] for each in records] == [1, 2, 3, 4, 5] and records[0]["train/loss"] is None
    some = client.get("/api/v1/runs/sam~first/metrics", params={"after_step": 3, "key": "train/reward"}).json()["records"]
    assert [set(each) for each in some] == [{"step", "time", "train/reward"}] * 2
    assert len(client.get("/api/v1/runs/sam~first/metrics", params={"limit": 2}).json()["records"]) == 2


def test_rollouts_and_checkpoints(client):
    assert {each["completion"] for each in client.get("/api/v1/runs/sam~first/rollouts").json()}
    missing = client.get("/api/v1/runs/sam~first/rollouts", params={"step": 99})
    assert (missing.status_code, missing.json()["problems"][0]["code"]) == (404, "file-not-found")
    assert client.get("/api/v1/runs/sam~first/checkpoints").json() == []
    assert client.get("/api/v1/runs/sam~first/exports").json() == []


def test_pages_for_a_browser(root):
    with TestClient(application(settings(root)), follow_redirects=False) as browser:
        html = {"Accept": "text/html"}
        assert browser.get("/", headers=html).headers["location"] == "/login"
        assert browser.post("/login", data={"token": "wrong"}).status_code == 401
        signed = browser.post("/login", data={"token": TOKENS["sam"]})
        cookie = signed.headers["set-cookie"]
        assert signed.headers["location"] == "/" and "HttpOnly" in cookie and "SameSite=strict" in cookie
        page = browser.get("/", headers=html)
        assert 'href="/runs/sam~first/report"' in page.text and "<script" not in page.text
        assert "train/reward" in browser.get("/runs/sam~first/report").text
        assert len(browser.get("/runs/sam~first/plotly.min.js").content) > 1 << 20
        assert browser.post("/api/v1/runs/sam~first/cancel").status_code == 401  # a cookie changes nothing
        assert browser.post("/logout", headers=html).headers["location"] == "/login"
        assert browser.get("/", headers=html).headers["location"] == "/login"  # the cookie has gone


def test_a_live_run_is_read_anew_and_an_ended_one_when_its_files_change(root):
    cache = RunCache(settings(root, cache_s=3600.0))
    first = cache.line("third")
    made_runs.steps(root / "third", 3, 4, made_runs.Texts("a", "b", "c", "d"), restored=2)
    assert cache.line("third") is first  # within cache_s
    cache.forget("third")
    assert cache.line("third")["step"] == 4
    at_once = RunCache(settings(root, cache_s=0.0))
    second = at_once.line("third")
    assert second["state"] == "stopped" or second["state"] == "failed"
    assert at_once.line("third") is second  # nothing has changed
    made_runs.steps(root / "third", 5, 5, made_runs.Texts("a", "b", "c", "d"), restored=4)
    assert at_once.line("third")["step"] == 5


@pytest.mark.parametrize("read", [RunCache.line, RunCache.full, RunCache.report])
def test_nothing_is_kept_of_a_removed_run(root, read):
    cache = RunCache(settings(root, cache_s=0.0))
    read(cache, "third")
    assert "third" in {run_id for run_id, _ in cache._slots}
    shutil.rmtree(root / "third")
    assert "third" not in cache.ids() and "third" not in {run_id for run_id, _ in cache._slots}


@pytest.mark.parametrize(("name", "content"), [("recipe.yaml", b"{"), ("recipe.yaml", b"\xff\xfe"), ("job.json", b"{")])
def test_a_run_that_cannot_be_read_does_not_hide_the_others(root, name: str, content: bytes):
    (root / "sue/second" / name).write_bytes(content)
    with TestClient(application(settings(root)), headers=bearer("vera"), raise_server_exceptions=False) as client:
        found = {each["id"]: each for each in client.get("/api/v1/runs").json()["runs"]}
        assert found["sue~second"]["state"] == "unknown" and found["sue~second"]["why"] and found["sam~first"]["step"] == 5
        assert client.get("/api/v1/runs/sue~second").json()["state"] == "unknown"
        assert "sam~first" in client.get("/").text
        report = client.get("/runs/sue~second/report")
        assert report.status_code in (422, 500) and report.json()["problems"]
