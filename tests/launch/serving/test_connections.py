"""Silent and slow connections end, displace one another, and never keep a request out."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import uvicorn

from launch.executors.executor import ROOT
from launch.serving.app import application
from launch.serving.connections import bounded
from launch.serving.refusals import RefusalLog
from tests.launch.serving.team import bearer, settings
from tests.launch.waiting import wait_until


@contextlib.contextmanager
def served(root, **bounds):
    """Serve with other bounds, in a thread; yield the port."""
    log = RefusalLog(root)
    config = uvicorn.Config(application(settings(root), log.record), port=0, http=bounded(**bounds), ws="none", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server", 60)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)


def connected(port: int, data: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    made.sendall(data)
    return made


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        return connection.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("bounds", [{"max_of_address": 8}, {"max_connections": 8}])
def test_silent_connections_displace_one_another(tmp_path, bounds):
    with served(tmp_path, arrival_s=600.0, **bounds) as port, contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connected(port, b"GET /" * (number % 2))) for number in range(30)]
        for _ in range(10):
            assert httpx.get(f"http://127.0.0.1:{port}/api/v1/me", headers=bearer("vera"), timeout=30).status_code == 200
        assert [is_closed(each) for each in silent[:20]] == [True] * 20


TOKEN = bearer("sam")["Authorization"].encode()
HEAD = b"POST /api/v1/plans HTTP/1.1\r\nHost: x\r\nAuthorization: %s\r\nContent-Length: 9\r\n" % TOKEN


@pytest.mark.parametrize("begun", [b"", b"GET / HT", HEAD, HEAD + b"\r\n{"], ids=["silent", "line", "headers", "body"])
def test_a_request_has_a_deadline(tmp_path, begun):
    with served(tmp_path, arrival_s=0.3) as port, connected(port, begun) as slow:
        wait_until(lambda: is_closed(slow), "the deadline", 30)


def test_a_connection_is_used_again_within_the_deadline(tmp_path):
    with served(tmp_path, arrival_s=2.0) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(3):
            assert client.get("/api/v1/me", headers=bearer("vera")).status_code == 200
            time.sleep(1.0)


HOLD = """\
import sys
from pathlib import Path
from launch.governance import audit_log
from launch.runs import shared_files
with shared_files.lock_file(Path(sys.argv[1]) / audit_log.LOG, 10):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_held_audit_log_delays_no_request(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as holder, served(tmp_path) as port:
        assert holder.stdout.readline() == b"held\n"
        for _ in range(3):
            url = f"http://127.0.0.1:{port}/api/v1"
            assert httpx.get(f"{url}/me", timeout=30).status_code == 401
            assert httpx.get(f"{url}/me", headers=bearer("vera"), timeout=30).status_code == 200
            assert httpx.post(f"{url}/runs/a/cancel", headers=bearer("vera"), timeout=30).status_code == 403
        holder.stdin.close()
