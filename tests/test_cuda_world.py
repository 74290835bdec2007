"""The world of tests on GPUs carries host tensors, as that of a run. torch's fake backend stands in for NCCL on GPUs."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.train.host_messages import all_gather_bytes
from tests import cuda_world


@pytest.fixture(autouse=True)
def no_nccl(monkeypatch):
    make = dist.init_process_group
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **place: make(backend.replace("nccl", "fake"), **place))


def test_the_megatron_backend_gathers_host_tensors():
    with cuda_world.alone():
        assert dist.get_backend_config() == "cpu:gloo,cuda:fake"
        assert all_gather_bytes(dist.group.WORLD, b"x") == [b"x"]
    assert not dist.is_initialized()


def test_a_group_of_the_gpus_carrier_alone_refuses_them():
    dist.init_process_group("cuda:nccl", store=FakeStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            all_gather_bytes(dist.group.WORLD, b"x")
    finally:
        dist.destroy_process_group()


def faults(source: str) -> list[int]:
    """Return the lines that make a group of NCCL alone, or one that is bound to its device, as no group of a run is."""
    nodes = list(ast.walk(ast.parse(source)))
    named = [node for node in nodes if isinstance(node, ast.Constant) and node.value in ("nccl", "cuda:nccl")]
    bound = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "device_id"]
    return [node.lineno for node in (*named, *bound)]


def test_no_test_makes_another_world():
    paths = set(Path(__file__).parent.glob("**/*.py")) - {Path(__file__)}
    assert len(paths) > 100 and {str(path): lines for path in paths if (lines := faults(path.read_text()))} == {}


def test_another_world_is_noticed():
    assert faults('dist.init_process_group("nccl", rank=0)') == faults("dist.init_process_group(x, device_id=d)") == [1]
    assert faults('dist.new_group(backend="cuda:nccl")') == [1] and faults("dist.init_process_group(carriers(d))") == []
