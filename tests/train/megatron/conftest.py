from pathlib import Path

import pytest
import torch

from tests.train.megatron.layouts import release, write_families


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Return a folder with one checkpoint per family that Megatron-Core trains, and Hugging Face's outputs for each."""
    folder = tmp_path_factory.mktemp("megatron-models")
    write_families(folder)
    return folder


@pytest.fixture(autouse=True)
def on_the_right_device(request):
    """Skip if Megatron-Core runs on another device: that was decided for the whole process at its import."""
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        pytest.skip("layouts are tested on the CPU: CUDA_VISIBLE_DEVICES= python -m pytest tests/train/megatron")


@pytest.fixture
def realm(realm):
    """Return a train realm of this process alone, on the CPU."""
    yield
    release()
