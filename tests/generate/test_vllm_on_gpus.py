"""Calls to vLLM that only GPUs run, checked in its CPU build: another worker and another model runner."""

import inspect

import pytest
from vllm.device_allocator.cumem import DEFERRABLE_TAGS
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner
from vllm.v1.worker.gpu_worker import Worker

from pipeline.generate.vllm_sleep import SLEEP_ARGUMENTS


@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_runners_return_their_model(runner):
    assert [*inspect.signature(runner.get_model).parameters] == ["self"]


def test_the_worker_sleeps_by_level_and_wakes_by_part():
    assert "level" in inspect.signature(Worker.sleep).parameters
    assert "tags" in inspect.signature(Worker.wake_up).parameters
    assert {"weights", "kv_cache"} == set(DEFERRABLE_TAGS)  # the first wake restores all other memory
    assert SLEEP_ARGUMENTS.keys() <= inspect.signature(EngineArgs).parameters.keys()
