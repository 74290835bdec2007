"""Read boxes of tensors from sharded files: any layout reads any other; missing parts are errors."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from pipeline.boxes import Box, whole
from pipeline.train.shards import BoxReader, collect_shards, read_shards


def cut(tensor, edges, folder):
    """Return a reader of `tensor`, with a file for each cell between the `edges` of its first two dimensions."""
    reader = BoxReader()
    rows, columns = edges
    for i, (a, b) in enumerate(itertools.pairwise(rows)):
        for j, (c, d) in enumerate(itertools.pairwise(columns)):
            path = folder / f"{i}-{j}.safetensors"
            save_file({"x": tensor[a:b, c:d].contiguous()}, path)
            reader.add("x", tuple(tensor.shape), path, Box((a, c), (b - a, d - c)))
    return reader


BOXES = [
    Box((0, 0), (7, 5)),
    Box((2, 1), (4, 3)),
    Box((6, 4), (1, 1)),
    Box((3, 0), (0, 5)),
    Box((0, 2), (3, 2)),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("edges", [((0, 7), (0, 5)), ((0, 3, 7), (0, 5)), ((0, 2, 3, 7), (0, 2, 4, 5))], ids=str)
def test_any_box_from_any_cut(edges, box, tmp_path):
    tensor = torch.arange(35.0).view(7, 5).to(torch.bfloat16)
    found = cut(tensor, edges, tmp_path).read("x", box)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, tensor[box.within(whole(tensor.shape))])


def test_holes_and_contradictions(tmp_path):
    tensor = torch.arange(35.0).view(7, 5)
    reader = cut(tensor, ((0, 3), (0, 5)), tmp_path)
    with pytest.raises(ValueError, match="hold 15 of the 35"):
        reader.read("x", whole((7, 5)))
    with pytest.raises(ValueError, match="no tensor 'y'"):
        reader.read("y", whole((7, 5)))
    with pytest.raises(ValueError, match="another file"):
        reader.add("x", (7, 6), tmp_path / "0-0.safetensors", Box((0, 0), (3, 5)))
    # Replicas count once: they do not fill holes.
    reader.add("x", (7, 5), tmp_path / "again.safetensors", Box((0, 0), (3, 5)))
    with pytest.raises(ValueError, match="hold 15 of the 35"):
        reader.read("x", whole((7, 5)))


def entry(name, tensor):
    return name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor


def test_every_dtype_and_scalars_come_back(tmp_path):
    tensors = {
        "float32": torch.randn(3),
        "bfloat16": torch.randn(2, 2, 2).bfloat16(),
        "uint8": torch.arange(4, dtype=torch.uint8),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
    }
    collect_shards([entry(*item) for item in tensors.items()], {"ranks": 1, "note": [0.1, 1e-300]}).write(tmp_path / "new", 0)
    reader, records = read_shards(tmp_path / "new")
    assert records[0]["note"] == [0.1, 1e-300]
    for name, tensor in tensors.items():
        found = reader.read(name, whole(tensor.shape))
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_several_boxes_of_one_tensor_by_one_rank(tmp_path):
    """Check boxes of a rank that holds a range of a flat buffer: a row's end, whole rows, a row's start."""
    tensor = torch.arange(35.0).view(7, 5)
    boxes = [Box((1, 3), (1, 2)), Box((2, 0), (2, 5)), Box((4, 0), (1, 1))]
    rest = [Box((0, 0), (1, 5)), Box((1, 0), (1, 3)), Box((4, 1), (1, 4)), Box((5, 0), (2, 5))]
    for rank, mine in enumerate((boxes, rest)):
        entries = [("x", (7, 5), box, tensor[box.within(whole((7, 5)))]) for box in mine]
        collect_shards(entries, {"ranks": 2}).write(tmp_path, rank)
    reader, _ = read_shards(tmp_path)
    assert torch.equal(reader.read("x", whole((7, 5))), tensor)
    assert torch.equal(reader.read("x", Box((1, 2), (4, 2))), tensor[1:5, 2:4])


def test_entries_that_contradict_themselves_are_errors(tmp_path):
    with pytest.raises(AssertionError, match=r"'x': a tensor of shape \(3,\)"):
        collect_shards([("x", (4,), Box((0,), (2,)), torch.zeros(3))], {"ranks": 1}).write(tmp_path, 0)
    with pytest.raises(AssertionError, match="occurs twice"):
        collect_shards([entry("x", torch.zeros(2)) for _ in range(2)], {"ranks": 1}).write(tmp_path, 0)


def test_a_missing_rank_is_an_error(tmp_path):
    collect_shards([entry("x", torch.ones(1))], {"ranks": 2}).write(tmp_path, 0)
    with pytest.raises(ValueError, match=r"got 1 train-rank.*expected 2"):
        read_shards(tmp_path)
    assert json.loads((tmp_path / "train-rank00000.json").read_text())["tensors"]["x"]["size"] == [1]
