"""Start vLLM's own server (vllm_server.py) on the CPU or a GPU."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_S = 300.0
OPTIONS = ("--served-model-name", "policy", "--enforce-eager", "--generation-config", "vllm")


@contextlib.contextmanager
def served(model: Path, template: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve a model in float32 with a chat template, and yield the address. log: what the server prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.rollout.vllm_server", "serve", str(model), "--port", str(port), *OPTIONS]
    command += ["--dtype", "float32", "--chat-template", str(template), *options]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(log, "wb") as printed, subprocess.Popen(command, env=env, stdout=printed, stderr=printed) as server:
        deadline = time.monotonic() + START_S
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)
