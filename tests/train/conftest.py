from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.config import determinism
from pipeline.train.kernels import make_deterministic
from tests.train.cases import write_classifiers, write_models


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Return a folder with one checkpoint per family, and those of classifiers."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    write_classifiers(folder)
    return folder


@pytest.fixture
def realm(monkeypatch):
    """Return a train realm of this process alone, on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def switches_restored():
    """Switch deterministic kernels off at the end."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def deterministic(monkeypatch, switches_restored):
    """Use deterministic kernels in this process, as policy.deterministic does in ranks."""
    for name, value in (determinism.SHARED | determinism.OF_TRAINING).items():
        monkeypatch.setenv(name, value)
    make_deterministic()
