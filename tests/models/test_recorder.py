"""Record small weight loaders, and compare with the same loaders on real tensors by value."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from pipeline.boxes import whole
from pipeline.generate.generate_backend import UpdateUnit
from pipeline.models.recorder import Recorder

DISK = {"a": (6, 8), "b": (6, 8), "c": (4, 3, 8)}
RAW = {"p": (12, 8), "q": (8, 12), "e": (4, 8, 4)}


def halves(disk, raw):
    raw["p"][:6].copy_(disk["a"])
    raw["p"][6:].copy_(disk["b"][:, :8].contiguous())


def transposed(disk, raw):
    raw["q"].copy_(torch.cat([disk["a"], disk["b"]]).t())


def interleaved(disk, raw):
    raw["p"].view(6, 2, 8)[:, 0].copy_(disk["a"].view(2, 3, 8).transpose(0, 1).reshape(6, 8))
    raw["p"].view(3, 4, 8)[:, 1::2].copy_(disk["b"].view(3, 2, 8).to(torch.float32))


def experts(disk, raw):
    stacked = torch.stack([disk["c"][i].t() for i in range(4)])[torch.tensor([3, 1])]
    raw["e"][1:3, :, :3].copy_(stacked)
    raw["e"][1:3, :, 3:].fill_(2.0)


def merged_dimensions(disk, raw):
    raw["p"].copy_(disk["c"].flatten(0, 1))
    raw["q"].view(-1)[10:15].copy_(disk["a"].view(-1)[6:11])


def padded(disk, raw):
    wide = disk["a"].new_zeros(12, 8)
    wide[2:8].copy_(disk["a"])
    raw["p"].copy_(wide)


def padded_copy(disk, raw):
    raw["p"].copy_(F.pad(disk["a"], (0, 0, 2, 4)).clone())


def constant(disk, raw):
    raw["p"].fill_(1.0)
    raw["p"][3:9].copy_(disk["a"])


def repeated(disk, raw):
    raw["q"].copy_(disk["a"][0].unsqueeze(1).expand(8, 12))


def recorded(loader):
    with torch.device("meta"):
        disk = {name: torch.empty(shape) for name, shape in DISK.items()}
        raw = {("owner", name): torch.empty(shape) for name, shape in RAW.items()}
    with Recorder(disk, raw) as recorder:
        loader(disk, {name: tensor for (_, name), tensor in raw.items()})
    return recorder


LOADERS = [halves, transposed, interleaved, experts, merged_dimensions, padded, padded_copy, constant, repeated]


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_by_value(loader):
    random = torch.Generator().manual_seed(0)
    disk = {name: torch.randn(shape, generator=random) for name, shape in DISK.items()}
    expected = {name: torch.zeros(shape) for name, shape in RAW.items()}
    loader(disk, expected)
    found = {name: torch.zeros(shape) for name, shape in RAW.items()}
    recorder = recorded(loader)
    assert not recorder.opaque
    for (_, name), writes in recorder.writes.items():
        assert writes.entries <= found[name].numel()
        for offset, size, strides, value in writes.fills:
            found[name].as_strided(size, strides, offset).fill_(value)
        for region in writes.regions:
            box = disk[region.name][region.box.within(whole(DISK[region.name]))]
            found[region.tensor].as_strided(region.box.size, region.strides, region.offset).copy_(box)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(tensor, torch.zeros_like(tensor)) for tensor in expected.values())


def arithmetic(disk, raw):
    raw["p"][:6].copy_(-torch.exp(disk["a"]))


def in_place_on_a_copy(disk, raw):
    raw["p"][:6].copy_(disk["a"].clone().mul_(2))


def in_place_on_the_parameter(disk, raw):
    raw["p"][:6].copy_(disk["a"])
    raw["p"].add_(disk["b"][0])


def of_the_parameter_itself(disk, raw):
    raw["p"][:6].copy_(disk["a"])
    raw["p"].copy_(raw["p"] * 2)


def half_empty(disk, raw):
    wide = torch.empty(12, 8)
    wide[2:8].copy_(disk["a"])
    raw["p"].copy_(wide)


COMPUTED = [arithmetic, in_place_on_a_copy, in_place_on_the_parameter, of_the_parameter_itself, half_empty]


@pytest.mark.parametrize("loader", COMPUTED, ids=lambda loader: loader.__name__)
def test_a_computed_value_makes_its_parameter_opaque(loader):
    recorder = recorded(loader)
    taken = recorder.opaque["owner"].union(*(writes.names() for writes in recorder.writes.values()))
    assert recorder.opaque and "a" in taken


def test_entries_written_twice_are_counted_twice():
    def twice(disk, raw):
        raw["p"].copy_(torch.cat([disk["a"], disk["b"]]))
        raw["p"][:6].copy_(disk["b"])

    (writes,) = recorded(twice).writes.values()
    assert writes.entries == 12 * 8 + 6 * 8


def test_unwritten_entries_become_zero_and_others_stay():
    importlib.import_module("pipeline.generate.vllm")  # sets what vLLM reads when it is imported
    from pipeline.generate.vllm_layout import Fill, ModuleUnit
    from pipeline.generate.vllm_update import _zero_holes

    def partly(disk, raw):
        raw["p"][3:9, ::2].copy_(disk["a"][:, :4])

    (writes,) = recorded(partly).writes.values()
    assert writes.entries == 24
    unit = UpdateUnit("owner", tuple(writes.regions))
    fill = Fill("p", 0, (2, 8), (8, 1), 1.0)
    described = ModuleUnit(unit, ("owner",), False, {}, frozenset({"p"}), frozenset({"p"}), (fill,))
    tensor = torch.full((12, 8), 5.0)
    _zero_holes("p", tensor, described)
    expected = torch.zeros(12, 8)
    expected[3:9, ::2] = 5.0
    expected[:2] = 5.0
    assert torch.equal(tensor, expected)
