"""Check that the FSDP2 backend offloads and reloads: plain, sharded in two precisions, with adapters, on two ranks."""

import ctypes
import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from pipeline.config import LoRAConfig
from pipeline.train.offload import Offload, host_memory
from pipeline.train.train_backend import ModelRole
from tests.train import cases, offloads, ranks
from tests.train.ranks import Layout

KINDS = {"plain": {}, "sharded": {"precision": "bfloat16"}, "adapters": {}}


def check(layout: Layout, folder: Path, kind: str = "plain") -> None:
    dtensor = {"lora_cfg": LoRAConfig(True, dim=3)} if kind == "adapters" else {}
    offloads.check_fsdp(layout, folder, "qwen3_tied", dtensor, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("realm")
def test_one_rank(kind, models):
    check(Layout(1, 1), models, kind)


@pytest.mark.usefixtures("realm")
def test_a_loaded_checkpoint_is_offloaded_too(models, tmp_path):
    first, again = (ranks.backend(cases.policy(models / "qwen3_tied")) for _ in range(2))
    batches = [cases.pack([0, 1, 2])]
    first.step(batches, cases.loss)
    first.shards().write(tmp_path, 0)
    again.load(tmp_path)
    again.offload()
    again.reload()
    assert again.step(batches, cases.loss).metrics == first.step(batches, cases.loss).metrics
    assert all(
        torch.equal(first.local_tensor(name), again.local_tensor(name)) for name in {region.tensor for region in first.layout()}
    )


@pytest.mark.long
def test_two_ranks(models):
    ranks.run(check, Layout(2, 1), models)
    ranks.run(check, Layout(1, 2), models)


@pytest.mark.usefixtures("realm")
def test_a_frozen_model(models):
    """Check a teacher or a reward model, which has only weights, and keeps them."""
    frozen = ranks.backend(cases.policy(models / "qwen3"), role=ModelRole(trained=False))
    batches = [cases.pack([0, 1, 2])]
    before = frozen.forward(batches)[0].logprobs
    frozen.offload(keep_weights=True)
    assert torch.equal(frozen.forward(batches)[0].logprobs, before)
    frozen.offload()
    assert not any(parameter.untyped_storage().nbytes() for parameter in frozen._model.parameters())
    frozen.reload()
    assert torch.equal(frozen.forward(batches)[0].logprobs, before)


@pytest.mark.usefixtures("realm")
def test_a_refit_keeps_only_the_merged_weights_of_a_model_with_adapters(models):
    trained = ranks.backend(cases.policy(models / "qwen3"), lora_cfg=LoRAConfig(True, dim=3))
    trained.step([cases.pack([0, 1, 2])], cases.loss)
    read = {name: trained.local_tensor(name).clone() for name in {region.tensor for region in trained.layout()}}
    trained.offload(keep_weights=True)
    assert all(torch.equal(trained.local_tensor(name), tensor) for name, tensor in read.items())
    adapted = {adapter.weight for adapter in trained._model.adapters.items}
    left = {name for name, parameter in trained._parameters.items() if parameter.untyped_storage().nbytes()}
    assert adapted and left == read.keys() - adapted


@pytest.mark.usefixtures("realm")
def test_a_frozen_model_is_copied_once(models):
    frozen = ranks.backend(cases.policy(models / "qwen3"), role=ModelRole(trained=False))
    weights = {name: frozen.local_tensor(name).clone() for name in {region.tensor for region in frozen.layout()}}
    assert weights
    for _ in range(2):
        frozen.offload()
        frozen.reload()
        assert all(torch.equal(frozen.local_tensor(name), tensor) for name, tensor in weights.items())
        for name in weights:
            frozen.local_tensor(name).zero_()  # would be copied, if anything was


def test_copies_follow_their_tensors():
    """Check the copies' size and lifetime; no tensor gets the copy of another one at the same address."""
    offload, tensor = Offload(torch.device("cpu")), torch.arange(10)
    offload.offload([tensor], frozen=True)
    offload.reload()
    tensor.resize_(20).copy_(torch.arange(20))
    offload.offload([tensor], frozen=True)
    assert [len(copy) for copy in offload._copies.values()] == [160]
    offload.reload()
    assert tensor.tolist() == list(range(20))
    for i in range(50):
        tensor = torch.full((20,), i)
        offload.offload([tensor], frozen=True)
        offload.reload()
        assert tensor.tolist() == [i] * 20 and len(offload._copies) == 1


def mapping(address: int) -> dict[str, str]:
    """Return the fields of /proc/self/smaps of the mapping that has this address."""
    text = Path("/proc/self/smaps").read_text()
    for start, end, access, rest in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) (.*\n(?:[A-Z].*\n)*)", text, re.MULTILINE):
        if int(start, 16) <= address < int(end, 16):
            return {"access": access, **dict(re.findall(r"^(\w+): *(.*?) *$", rest, re.MULTILINE))}
    raise ValueError(f"{address:#x} is not mapped")


class CUDA:
    """A stand-in for CUDA's runtime."""

    def __init__(self):
        self.locked: dict[int, int] = {}
        self.first: list[int] = []  # byte, of memory when it was unlocked
        self.mappings: list[dict[str, str]] = []  # of memory when it was locked, as Linux describes them

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        self.mappings.append(mapping(address))
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.first.append(ctypes.string_at(address, 1)[0])
        del self.locked[address]


def test_page_locked_memory_has_the_size_of_its_content_and_is_freed(monkeypatch):
    cuda, checked = CUDA(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", checked.append)
    held = [host_memory(size, True) for size in (1, 4097, (1 << 20) + 1)]
    assert {memory.data_ptr(): memory.numel() for memory in held} == cuda.locked and checked == [0] * 3
    assert all(address % 4096 == 0 for address in cuda.locked)
    for memory in held:
        memory.fill_(7)
    del held, memory
    gc.collect()
    assert not cuda.locked and cuda.first == [7] * 3  # while it was still there
    host_memory(10, False)
    assert len(checked) == 3


def test_page_locked_memory_is_in_large_pages_that_a_fork_does_not_get(monkeypatch):
    cuda = CUDA()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    memory = host_memory((8 << 20) + 1, True)
    (found,) = cuda.mappings
    assert found["access"] == "rw-p" and {"hg", "dc"} <= set(found["VmFlags"].split())
    assert found["Rss"] == found["Size"]  # the pages are there before they are locked
    assert not memory.any()
    plain = host_memory(8 << 20, False)
    assert not {"hg", "dc"} & set(mapping(plain.data_ptr())["VmFlags"].split())


def test_a_kernel_without_large_pages_locks_others(monkeypatch):
    cuda = CUDA()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # EINVAL, as Linux answers without CONFIG_TRANSPARENT_HUGEPAGE
    assert host_memory(10, True).tolist() == [0] * 10
    assert "dc" in cuda.mappings[0]["VmFlags"].split()


@pytest.mark.parametrize("shared", [False, True])
def test_cudas_cache_is_emptied_for_another_process_only(monkeypatch, shared):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    Offload(torch.device("cuda", 0), shared).drop([])
    assert bool(emptied) == shared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="locks memory for a GPU")
def test_page_locked_memory_on_a_gpu():
    offload, tensor = Offload(torch.device("cuda", 0)), torch.arange(100_001, device="cuda")
    for _ in range(2):
        offload.offload([tensor])
        assert tensor.untyped_storage().nbytes() == 0 and all(copy.is_pinned() for copy in offload._copies.values())
        offload.reload()
        assert torch.equal(tensor.cpu(), torch.arange(100_001))
