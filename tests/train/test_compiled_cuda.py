"""Compare compiled decoder layers with eager ones on a GPU, with Inductor's triton."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.multiprocessing as mp

from pipeline.config import determinism
from pipeline.train.kernels import make_deterministic
from tests import cuda_world
from tests.train import compiled
from tests.train.ranks import Layout

pytestmark = pytest.mark.gpu
ONE = Layout(1, 1)


@pytest.fixture
def nccl():
    torch._dynamo.reset()
    with cuda_world.alone():
        yield


@pytest.mark.parametrize("precision", compiled.NEAR)
def test_compiled_layers_agree_with_eager_ones(models, nccl, precision):
    compiled.check_agrees(ONE, models / "qwen3", precision)


def test_null_compiles(models, nccl):
    assert compiled.backend(models / "qwen3", ONE, None)._model.compiled


def test_the_reference(models, nccl):
    compiled.check_reference(ONE, models)


@pytest.mark.parametrize("precision", compiled.NEAR)
def test_a_resumed_run_equals_the_uninterrupted_one(models, tmp_path, precision):
    (tmp_path / "qwen3").symlink_to(models / "qwen3")
    for work in (compiled.train_and_save, compiled.resume):
        mp.start_processes(_alone, (work, tmp_path, precision), nprocs=1, start_method="spawn")


def _alone(_: int, work: Callable[[Layout, Path, str], None], folder: Path, precision: str) -> None:
    """Run the work with deterministic kernels, in a process that is a world of one."""
    os.environ |= determinism.SHARED
    make_deterministic()
    with cuda_world.alone():
        work(ONE, folder, precision)
