"""Bad requests are refused, whoever sends them, and change nothing."""

import json
import random
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from launch.serving.app import application
from tests.launch import made_runs
from tests.launch.serving.team import TOKENS, bearer, settings

IDS = ("sam~first", "sue~second", "third")
POSTS = ("cancel", "stop", "exports", "evaluations")
TRICKS = (
    "..", "../sam/first", "..%2f..%2fetc", "%2e%2e~sam", "sam~..~..~etc", "sam/first", "sam~first~", "~sam", ".hidden",
    "sam~.first", "sam%00first", "sam~first%00", "C:\\runs", "sam\\first", "link", "a" * 3000, "sam~first;x",
    "sam~first%0d%0aX: y", "é", "\U0001f600",
)  # fmt: skip


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def root(tmp_path):
    for name in ("sam/first", "sue/second", "third"):
        made_runs.steps(made_runs.folder(tmp_path / "runs" / name), 1, 2, made_runs.Texts("a", "b", "c", "d"))
    made_runs.folder(tmp_path / "elsewhere")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "runs"


def bad_requests(dice: random.Random):
    """Yield (method, path, headers, body, the statuses that refuse it)."""
    good = {"recipe": "tiny_sft", "name": "mine"}
    unknown = (
        {},
        {"Cookie": "hetstep_token=no"},
        *({"Authorization": value} for value in ("", "Bearer", "Bearer wrong", "Basic c2FtOg==", "Bearer " + "x" * 5000)),
        *({"Authorization": value.format(TOKENS["ada"])} for value in ("bearer{}", "Bearer {}x", "Basic {}")),
    )
    reads = ("me", "runs", *(f"runs/{run}{rest}" for run in IDS for rest in ("", "/metrics", "/rollouts", "/exports")))
    for headers in unknown:  # nobody's tokens
        for path in reads:
            yield "GET", path, headers, None, {401}
        for run in IDS:
            for post in POSTS:
                yield "POST", f"runs/{run}/{post}", headers, {}, {401}
        yield "POST", "runs", headers, good, {401}
    for name, runs in (("vera", IDS), ("sam", ("sue~second", "third")), ("sue", ("sam~first", "third"))):
        for run in runs:  # a viewer's changes, and other users' runs
            for post in POSTS:
                yield "POST", f"runs/{run}/{post}", bearer(name), {}, {403}
    for path in ("runs", "plans"):
        yield "POST", path, bearer("vera"), good if path == "runs" else {"recipe": "tiny_sft"}, {403}
    yield "POST", "runs/sam~first/cancel", {"Cookie": f"hetstep_token={TOKENS['ada']}"}, {}, {401}
    for trick in TRICKS:  # ids that are none
        for rest in ("", "/metrics", "/rollouts", "/checkpoints", "/evaluations", "/exports"):
            yield "GET", f"runs/{trick}{rest}", bearer("ada"), None, {404}
        for post in POSTS:
            yield "POST", f"runs/{trick}/{post}", bearer("ada"), {}, {404}
    names = ("../x", "a/b", "", ".x", "a\0b", "x" * 65, "é", 3, None, ["x"], {"x": 1})
    for name in names:
        yield "POST", "runs", bearer("sam"), {**good, "name": name}, {422}
        yield "POST", "runs", bearer("sam"), {**good, "recipe": name}, {422, 404}
    for recipe in ("/etc/passwd", "../recipes/tiny_sft.yaml", "recipes/tiny_sft.yaml", "tiny_sft\n"):
        yield "POST", "runs", bearer("sam"), {**good, "recipe": recipe}, {422}
    wrong = ([], "x", 3, {"run_dir": "/tmp/x"}, {"": 1}, {"a=b": 1}, {"x": "\ud800"}, {"sft": {"max_num_steps": -1}})
    for overrides in (*wrong, {"no_such_key": 1}, {"policy.precision": "fp3"}, {"x": [[[]]] * 300}):
        yield "POST", "runs", bearer("sam"), {**good, "overrides": overrides}, {422}
    yield "POST", "runs", bearer("sam"), {**good, "surplus": 1}, {422}
    for body in (b"", b"{", b"[" * 20000, b"\xff\xfe", b'{"recipe": NaN}', b"null", b"[]", b'"x"', b'{"name":"a","name":"b"}'):
        for path in ("runs", "plans", "runs/sam~first/exports", "runs/sam~first/evaluations"):
            if body or path.count("/") == 0:
                yield "POST", path, bearer("sam"), body, {400, 422}
    for size in (65_537, 1 << 20, 8 << 20):  # above the bound, announced or not
        yield "POST", "runs", bearer("sam"), b"x" * size, {413}
        yield "POST", "runs", bearer("sam"), iter([b"x" * 40_000] * (size // 40_000 + 1)), {413}
        yield "POST", "login", {}, b"token=" + b"x" * size, {404, 413}
    for value in ("-1", "x", "1e3", "99999999", "0x1", "", "1;2", "٣"):
        yield "GET", f"runs?limit={value}", bearer("vera"), None, {422}
        yield "GET", f"runs/sam~first/metrics?limit={value}", bearer("vera"), None, {422}
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "NOPE"):
        for path in ("runs", "runs/sam~first", "me"):
            yield method, path, bearer("ada"), None, {405}
    while True:  # random bytes as paths and bodies
        path = "".join(f"%{dice.randrange(256):02x}" for _ in range(dice.randrange(1, 30)))
        yield "GET", f"runs/{path}/metrics", bearer("ada"), None, {404}
        yield "POST", "runs", bearer("sam"), dice.randbytes(dice.randrange(1, 300)), {400, 422}


def test_a_thousand_bad_requests(root):
    before, told = everything(root.parent), []
    app = application(settings(root), refused=lambda *what: told.append(what))
    statuses: dict[int, int] = {}
    with TestClient(app, raise_server_exceptions=False, follow_redirects=False) as client:
        for _, (method, path, headers, body, allowed) in zip(range(1000), bad_requests(random.Random(0)), strict=False):
            content = body if body is None or not isinstance(body, dict) else json.dumps(body).encode()
            kind = {"Content-Type": "application/json"} if content is not None else {}
            answer = client.request(method, f"/api/v1/{path}", headers=kind | headers, content=content)
            assert answer.status_code in allowed, (
                method,
                path[:100],
                headers,
                str(body)[:100],
                answer.status_code,
                answer.text,
            )
            assert "Traceback" not in answer.text
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert client.get("/api/v1/runs", headers=bearer("vera")).json()["total"] == 3
    assert sum(statuses.values()) == 1000 and {401, 403, 404, 405, 413, 422} <= set(statuses)
    assert len(told) == statuses[401] + statuses[403]
    assert everything(root.parent) == before


def test_a_file_where_the_service_runs_is_no_recipe(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("secret: 3\n")
    with TestClient(application(settings(root))) as client:
        for name in ("mine", "mine.yaml"):
            for path, body in (
                ("plans", {"recipe": name}),
                ("runs", {"recipe": name, "name": "x"}),
                ("runs/sam~first/evaluations", {"suite": name}),
            ):
                answer = client.post(f"/api/v1/{path}", json=body, headers=bearer("sam"))
                assert answer.status_code == 404 and "secret" not in answer.text, answer.text


def test_a_service_that_only_reads_refuses_changes(root):
    with TestClient(application(settings(root, writable=False))) as client:
        for name in ("sam", "ada"):
            answer = client.post("/api/v1/runs/sam~first/cancel", headers=bearer(name))
            assert answer.status_code == 403 and "writable: true" in answer.json()["problems"][0]["message"]


@pytest.mark.parametrize(
    ("body", "key", "code", "says"),
    [
        ({"recipe": "tiny_sft", "overides": {}}, "overides", "unknown-key", "is not a key of this request"),
        ({"recipe": "recipes/tiny_sft.yaml"}, "recipe", "bad-format", '.yaml"; expected a name, not a path'),
        ({}, "recipe", "missing-value", "got none"),
        (b'{"recipe": tiny}', "body", "bad-format", "is not JSON: Expecting value"),
        ({"recipe": "tiny_sft", "overrides": 3}, "overrides", "bad-format", "got 3: input should be"),
    ],
)
def test_a_request_that_does_not_fit_is_told_by_its_key(root, body, key, code, says):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with TestClient(application(settings(root))) as client:
        answer = client.post("/api/v1/plans", headers=bearer("sam") | {"Content-Type": "application/json"}, content=content)
    (problem,) = answer.json()["problems"]
    assert (answer.status_code, problem["key"], problem["code"]) == (422, key, code)
    assert says in problem["message"]
