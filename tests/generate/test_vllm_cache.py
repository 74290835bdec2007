"""The folder of vLLM's compiled code: one for each GPU, for the code holds the GPU's index."""

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.compilation import backends, decorators

from pipeline.generate import vllm_launcher


def start(monkeypatch, index: int, uuid: str) -> str:
    """Return the folder that vLLM uses in a process whose GPU has this index."""
    envs.disable_envs_cache()  # of an engine of another test
    monkeypatch.setattr(vllm_launcher.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
    with vllm_launcher.launcher_environment(engine_ranks=1, rank_in_engine=0):
        assert (os.environ["LOCAL_RANK"], os.environ["RANK"]) == (str(index), "0")
        during = envs.VLLM_CACHE_ROOT
    assert during == envs.VLLM_CACHE_ROOT  # later compilations use it too
    return during


def test_engines_on_two_gpus_share_no_compiled_code(monkeypatch):
    roots = []
    for index, uuid in ((0, "a"), (3, "b"), (0, "b"), (3, "b")):
        monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")  # of a new process
        roots.append(start(monkeypatch, index, uuid))
    assert roots[1] == roots[3] and len(set(roots)) == 3
    assert start(monkeypatch, 3, "b") == roots[3]  # a second engine of the process


@pytest.mark.parametrize("module", [backends, decorators])
def test_vllm_names_the_folder_after_the_rank_alone(module):
    """If this fails, vLLM may tell devices apart by itself, and `caches.of_device` may no longer be needed."""
    assert 'f"rank_{rank}_{dp_rank}"' in inspect.getsource(module)
