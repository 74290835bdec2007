from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
