"""Measure what others wait while 45 plans of one user of the REST service hang.

    python -m tests.benchmarks.serving_under_load

The service is a process of its own. Each process of a plan is stopped as soon as it appears, as by a file system that hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from launch.executors.executor import ROOT
from launch.serving.access import digest
from tests.launch import made_runs
from tests.launch.serving.team import ROLES, TOKENS, bearer

PLANS, READS, TIMEOUT_S = 45, 300, 60.0


@dataclass(frozen=True)
class Measured:
    """The measured answers and times."""

    seconds: list[float]  # of the other users' requests, ascending
    statuses: Counter[int]  # of these requests
    plans: Counter[int]  # statuses of the plans that hang; 0: no answer until the service's end
    other_plan: int  # status of a plan of another user meanwhile
    ended_s: float  # from SIGTERM to the end of the service
    left: int  # processes of plans after the service's end

    def percentile(self, share: float) -> float:
        """Return the seconds within which a share of the requests was answered."""
        return self.seconds[min(len(self.seconds) - 1, int(share * len(self.seconds)))]


@contextmanager
def service(root: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start the service over a folder with two runs, and yield its address and process."""
    for name in ("sam/first", "sue/second"):
        made_runs.folder(root / "runs" / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    users = {name: {"role": role, "token_sha256": digest(TOKENS[name])} for name, role in ROLES.items()}
    (root / "serve.yaml").write_text(yaml.safe_dump({"root": str(root / "runs"), "users": users, "port": port, "cache_s": 0.2}))
    with open(root / "serve.log", "wb") as log:
        command = [sys.executable, str(ROOT / "launch/serve.py"), f"settings={root / 'serve.yaml'}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{address}/login")
                break
            except httpx.TransportError:
                assert process.poll() is None, (root / "serve.log").read_text()
                time.sleep(0.1)
        yield address, process
    finally:
        process.kill()
        process.wait()


def measure(root: Path, plans: int = PLANS, reads: int = READS) -> Measured:
    """Send `plans` that hang, then `reads` requests of others, and end the service."""
    stopped: dict[int, psutil.Process] = {}
    done, hold = threading.Event(), threading.Event()

    def stop_plans(pid: int) -> None:
        while not done.wait(0.02):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for each in psutil.Process(pid).children() if not hold.is_set() else ():
                    if each.pid not in stopped:
                        stopped[each.pid] = each
                        os.kill(each.pid, signal.SIGSTOP)

    def read(number: int) -> tuple[int, float]:
        path = ("runs", "runs/sue~second", "me", "runs/sue~second/metrics")[number % 4]
        begun = time.monotonic()
        answer = httpx.get(f"{address}/api/v1/{path}", headers=bearer("vera"), timeout=TIMEOUT_S)
        return answer.status_code, time.monotonic() - begun

    def plan(user: str) -> int:
        body = {"recipe": "tiny_sft", "overrides": {"cluster.executor": "local"}}
        try:
            return httpx.post(f"{address}/api/v1/plans", headers=bearer(user), json=body, timeout=600).status_code
        except httpx.TransportError:
            return 0

    with service(root) as (address, process), ThreadPoolExecutor(plans) as senders, ThreadPoolExecutor(4) as readers:
        stopper = threading.Thread(target=stop_plans, args=(process.pid,))
        stopper.start()
        hanging = [senders.submit(plan, "sam") for _ in range(plans)]
        while len(stopped) < 2:
            time.sleep(0.05)
        found = list(readers.map(read, range(reads)))
        hold.set()
        other = plan("sue")
        begun = time.monotonic()
        process.terminate()
        process.wait(TIMEOUT_S)
        took = time.monotonic() - begun
        done.set()
        stopper.join()
        statuses = Counter(each.result() for each in hanging)
    _, left = psutil.wait_procs(stopped.values(), timeout=10)
    seconds = sorted(each for _, each in found)
    return Measured(seconds, Counter(status for status, _ in found), statuses, other, took, len(left))


def main() -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    print(f"{PLANS} plans of one user that hang: answers by status {dict(found.plans)} (0: none before the service's end)")
    print(f"{READS} requests of another user meanwhile: answers by status {dict(found.statuses)}")
    p50, p99, most = (1e3 * found.percentile(share) for share in (0.5, 0.99, 1.0))
    print(f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {most:.0f} ms")
    print(f"a plan of a third user meanwhile: status {found.other_plan}")
    print(f"SIGTERM ends the service after {found.ended_s:.1f} s; processes of plans after it: {found.left}")


if __name__ == "__main__":
    main()
