"""A team submits, watches, stops, exports and evaluates real runs through the service, as another process."""

import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import yaml

from launch.executors.executor import ROOT
from launch.serving.access import digest
from tests.benchmarks import serving_under_load
from tests.launch.serving.team import ROLES, TOKENS, bearer
from tests.launch.waiting import wait_until

pytestmark = pytest.mark.full
SMALL = {
    "sft": {"max_val_samples": 16, "val_at_end": False, "max_num_steps": 100_000},
    "policy": {"train_global_batch_size": 8, "scheduler": None},
    "cluster": {"executor": "local", "train.ranks_per_node": 1},
}


@pytest.fixture
def address(tmp_path):
    (tmp_path / "runs").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    users = {name: {"role": role, "token_sha256": digest(TOKENS[name])} for name, role in ROLES.items()}
    settings = {"root": str(tmp_path / "runs"), "users": users, "writable": True, "port": port, "cache_s": 0.2}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(settings))
    with open(tmp_path / "serve.log", "wb") as log:
        command = [sys.executable, str(ROOT / "launch/serve.py"), f"settings={tmp_path / 'serve.yaml'}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or answers(address), "the service", 120)
        assert process.poll() is None, (tmp_path / "serve.log").read_text()
        yield address
    finally:
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM, (tmp_path / "serve.log").read_text()


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/login").status_code == 200
    except httpx.TransportError:
        time.sleep(0.1)
        return False


def test_from_submission_to_evaluation(address, tmp_path):
    sam = httpx.Client(base_url=f"{address}/api/v1", headers=bearer("sam"), timeout=120)
    plan = sam.post("/plans", json={"recipe": "tiny_sft", "overrides": SMALL})
    assert plan.status_code == 200 and plan.json()["fits"], plan.text
    submitted = sam.post("/runs", json={"recipe": "tiny_sft", "name": "first", "overrides": SMALL})
    assert submitted.status_code == 201, submitted.text
    assert submitted.json()["id"] == "sam~first" and (tmp_path / "runs/sam/first/recipe.yaml").exists()
    again = sam.post("/runs", json={"recipe": "tiny_sft", "name": "first", "overrides": SMALL})
    assert (again.status_code, again.json()["problems"][0]["code"]) == (409, "in-use")
    wait_until(lambda: sam.get("/runs/sam~first").json()["step"] >= 2, "the second step", 300)
    assert httpx.post(f"{address}/api/v1/runs/sam~first/stop", headers=bearer("sue")).status_code == 403
    assert sam.post("/runs/sam~first/stop").status_code == 202
    wait_until(lambda: sam.get("/runs/sam~first").json()["state"] == "stopped", "the end", 300)
    (checkpoint,) = sam.get("/runs/sam~first/checkpoints").json()
    assert sam.post("/runs/sam~first/exports", json={"step": 99}).status_code == 404
    export = sam.post("/runs/sam~first/exports", json={}).json()
    assert export["folder"].endswith(f"hf_step_{checkpoint['step']}")
    wait_until(lambda: sam.get("/runs/sam~first/exports").json()[0]["state"] != "running", "the export", 300)
    assert sam.get("/runs/sam~first/exports").json() == [{"folder": export["folder"], "state": "done", "why": ""}]
    small = {"evaluate.tasks.addition.data.max_samples": 8, "policy.generation.backend": "transformers"}
    body = {"suite": "tiny", "overrides": {**small, "cluster.executor": "local"}}
    answer = sam.post("/runs/sam~first/evaluations", json=body)
    assert answer.status_code == 201, answer.text
    wait_until(lambda: (sam.get("/runs/sam~first/evaluations").json() or [{}])[0].get("scores"), "the scores", 300)
    (suite,) = sam.get("/runs/sam~first/evaluations").json()
    assert suite["scores"][str(checkpoint["step"])]["addition"]["value"] is not None
    assert "train/loss" in httpx.get(f"{address}/runs/sam~first/report", headers=bearer("vera")).text


def test_a_client_made_from_the_openapi_page(address, tmp_path):
    pytest.importorskip("openapi_python_client")
    document = tmp_path / "openapi.json"
    document.write_bytes(httpx.get(f"{address}/openapi.json", headers=bearer("vera")).content)
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", str(document), "--meta", "none"]
    subprocess.run([*command, "--output-path", str(tmp_path / "made_client")], check=True, capture_output=True, timeout=300)
    use = (
        "import sys; from made_client import AuthenticatedClient\n"
        "from made_client.api.default import list_runs_api_v1_runs_get as runs, me_api_v1_me_get as me\n"
        "client = AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2])\n"
        "print(me.sync(client=client).name, runs.sync(client=client).total)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", use, address, TOKENS["vera"]], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout == "vera 0\n", ended.stderr


def test_hanging_plans_of_a_user_delay_no_other(tmp_path):
    found = serving_under_load.measure(tmp_path, reads=60)
    assert found.statuses == {200: 60} and found.other_plan == 200, found
    assert set(found.plans) <= {0, 409, 500, 504} and found.left == 0, found
