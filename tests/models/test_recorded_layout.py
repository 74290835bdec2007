"""Compare recorded pieces with the results of the functions on real tensors."""

import functools
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F

from pipeline.boxes import Box, whole
from pipeline.models.recorded_layout import copy_pieces, cut, cut_after, flat_boxes, invert, record, record_all, restrict


def numbered(shapes):
    """Return sources whose entries all differ, and are not 0."""
    tensors, first = [], 1
    for shape in shapes:
        tensors.append(torch.arange(first, first + math.prod(shape)).view(shape))
        first += math.prod(shape)
    return tensors


def reader(tensors):
    return lambda name, box: tensors[name][box.within(whole(tuple(tensors[name].shape)))]


def counts(shape, boxes):
    """Return how often each entry is in a box."""
    counted = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counted[box.within(whole(shape))] += 1
    return counted


def check(function, *shapes):
    """Rebuild the function's result from its pieces, and check that they cover each entry that is not filled once.

    Return the pieces.
    """
    names = [f"source {i}" for i in range(len(shapes))]
    sources = numbered(shapes)
    real = function(*sources)
    shape, pieces = record(function, list(zip(names, shapes, strict=True)))
    assert shape == tuple(real.shape)
    for piece in pieces:
        assert [n for n in piece.source.size if n > 1] == [n for n in piece.target.size if n > 1]
    built = torch.zeros(shape, dtype=real.dtype)
    copy_pieces(built, pieces, reader(dict(zip(names, sources, strict=True))))
    assert torch.equal(built, real)
    assert torch.equal(counts(shape, [piece.target for piece in pieces]), (real != 0).long())
    return pieces


def grouped(query, key, value):
    return torch.cat([x.unflatten(0, (2, -1)) for x in (query, key, value)], 1).flatten(0, 1)


def zeros_and_copy(x):
    padded = x.new_zeros(8, 4)
    padded[:3] = x[:3]
    padded.narrow(0, 4, 3).copy_(x.narrow(0, 3, 3))
    return padded


CASES = {
    "same": (lambda x: x, [(3, 4)], 1),
    "scalar": (lambda x: x.view(()), [(1,)], 1),
    "nothing": (lambda x: x[:0], [(3, 4)], 0),
    "cat rows": (lambda x, y: torch.cat([x, y]), [(3, 4), (2, 4)], 2),
    "cat columns": (lambda x, y: torch.cat([x, y], -1), [(3, 4), (3, 2)], 2),
    "stack": (lambda x, y: torch.stack([x, y], 1), [(3, 4), (3, 4)], 2),
    "stack last": (lambda x, y: torch.stack([x, y], -1), [(3, 4), (3, 4)], 2),
    "chunk": (lambda x: x.chunk(2)[1], [(6, 4)], 1),
    "columns": (lambda x: x.split(2, 1)[1], [(6, 4)], 1),
    "unbind and select": (lambda x: torch.cat([x.unbind(1)[2], x[:, 0]]), [(2, 3, 4)], 2),
    "swap halves": (lambda x: torch.cat(x.chunk(2)[::-1]), [(6, 4)], 2),
    "merge dimensions": (lambda x: x.reshape(6, 4), [(2, 3, 4)], 2),
    "split dimension": (lambda x: x.view(2, 3, 4), [(6, 4)], 2),
    "flatten": (lambda x: x.flatten(), [(3, 4)], 3),
    "flat part of a matrix": (lambda x: x.flatten()[2:11], [(4, 4)], 3),
    "rows that do not fit": (lambda x: x.view(3, 8), [(6, 4)], 6),
    "outer dimensions change places": (lambda x: x.view(3, 2, 4).transpose(0, 1).reshape(6, 4), [(6, 4)], 6),
    "transposed and back": (lambda x: x.t()[1:3].t(), [(3, 4)], 1),
    "permuted around a dimension of 1": (lambda x: x.permute(1, 0, 2).contiguous(), [(3, 1, 4)], 1),
    "every second row": (lambda x: x[::2].clone(), [(6, 4)], 3),
    "padded": (lambda x: F.pad(x, (0, 0, 0, 2)), [(3, 4)], 1),
    "padded around": (lambda x: F.pad(x, (1, 2, 3, 0)), [(3, 4)], 1),
    "padded by cat": (lambda x: torch.cat([x, x.new_zeros(2, 4)])[1:], [(3, 4)], 1),
    "zeros and copy": (zeros_and_copy, [(6, 4)], 2),
    "change of type": (lambda x: x.to(torch.float64).narrow(1, 1, 2), [(3, 4)], 1),
    "grouped": (grouped, [(8, 3), (2, 3), (2, 3)], 6),
    "grouped bias": (grouped, [(8,), (2,), (2,)], 6),
    "part of a group": (lambda *x: grouped(*x)[3:10], [(8, 3), (2, 3), (2, 3)], 4),
    "row of groups": (cut_after(grouped, "rows", 1, 2), [(8, 3), (2, 3), (2, 3)], 3),
    "halves": (cut_after(lambda x, y: torch.cat([x, y]), "halves", 1, 2), [(6, 4), (6, 4)], 2),
    "halves of one": (cut_after(lambda x: x, "halves", 0, 3), [(12, 2)], 2),
    "experts": (lambda *x: torch.stack([torch.cat([x[0], x[1]]), torch.cat([x[2], x[3]])]), [(2, 3)] * 4, 4),
    "experts apart": (lambda x: torch.cat([e.chunk(2)[1] for e in x]), [(3, 4, 2)], 3),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_rebuild_the_functions_result(case):
    function, shapes, number = CASES[case]
    assert len(check(function, *shapes)) == number


def random_step(rng, tensors):
    """Return one operation on a list of tensors, chosen by `rng`; the same for real and meta tensors of the same shapes."""
    i = rng.randrange(len(tensors))
    x = tensors[i]
    kind = rng.choice(["narrow", "split", "pad", "clone", "view", "stack", "cat", "outer", "copy"])
    if kind == "narrow":
        dim = rng.randrange(x.dim())
        start = rng.randrange(x.shape[dim])
        x = x.narrow(dim, start, rng.randint(1, x.shape[dim] - start))
    elif kind == "split":
        dim = rng.randrange(x.dim())
        parts = list(x.split(rng.randint(1, x.shape[dim]), dim))
        rng.shuffle(parts)
        x = torch.cat(parts, dim)
    elif kind == "pad":
        x = F.pad(x, [rng.randint(0, 2) for _ in range(2 * x.dim())])
    elif kind == "clone":
        x = x.clone()
    elif kind == "view":
        total = x.numel()
        first = rng.choice([n for n in range(1, total + 1) if total % n == 0])
        second = rng.choice([n for n in range(1, total // first + 1) if total // first % n == 0])
        x = x.reshape(rng.choice([(first, second, total // first // second), (first, total // first), (total,)]))
    elif kind == "stack":
        x = torch.stack([x, torch.zeros_like(x)], rng.randrange(x.dim() + 1))
    elif kind == "cat" and len(tensors) > 1:
        y = tensors.pop((i + 1) % len(tensors))
        i = next(at for at, t in enumerate(tensors) if t is x)
        x = torch.cat([x.flatten(), y.flatten()])
    elif kind == "outer" and x.dim() == 3:
        x = x.transpose(0, 1)
    elif kind == "copy":
        target = x.new_zeros([n + 1 for n in x.shape])
        target[tuple(slice(1, None) for _ in x.shape)] = x
        x = target
    if x.numel() <= 400:
        tensors[i] = x


def random_function(seed, *sources):
    rng = random.Random(seed)
    tensors = list(sources)
    for _ in range(rng.randint(2, 7)):
        random_step(rng, tensors)
    return torch.cat([x.flatten() for x in tensors]) if seed % 2 else tensors[0]


@pytest.mark.parametrize("block", range(4))
def test_random_compositions(block):
    """Check that those that transpose are refused, and all others are correct."""
    right = 0
    for seed in range(100 * block, 100 * (block + 1)):
        try:
            check(functools.partial(random_function, seed), (4, 6), (2, 3, 4), (5,))
            right += 1
        except ValueError as error:
            assert "transposes" in str(error)
    assert right > 80


REFUSED = {
    "arithmetic": (lambda x: x + 1, "aten.add"),
    "in place": (lambda x: x.clone().mul_(2), "aten.mul_"),
    "index": (lambda x: x[torch.tensor([1, 0], device=x.device)], "aten.index"),
    "expand": (lambda x: x[:1].expand(3, 4), "expand"),
    "repeat": (lambda x: x.repeat(2, 1), "once|aten"),
    "transpose": (lambda x: x.t().contiguous(), "transposes"),
    "bytes": (lambda x: x.view(torch.int32), "aten.view"),
    "pad with ones": (lambda x: F.pad(x, (0, 1), value=1.0), "zeros"),
    "pad cuts": (lambda x: F.pad(x, (0, -1)), "aten.constant_pad_nd"),
    "copied over": (lambda x: x.clone()[:1].copy_(x[1:2]), "does not consist of its sources"),
    "foreign": (lambda x: torch.empty(3, 4), "does not consist of its sources"),
    "foreign in cat": (lambda x: torch.cat([x, torch.ones(3, 4)]), "does not consist of its sources"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_function_that_pieces_cannot_express_is_refused(case):
    function, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        record(function, {"x": (3, 4)})


def test_one_recording_serves_equal_partials():
    calls = []

    def first_rows(count, x):
        calls.append(count)
        return x[:count]

    for name in ("a", "b"):
        _, pieces = record(cut_after(functools.partial(first_rows, 4), "rows", 1, 2), {name: (6, 2)})
        assert pieces[0].name == name
        assert pieces[0].source == Box((2, 0), (2, 2))
    record(functools.partial(first_rows, 3), {"a": (6, 2)})
    record(functools.partial(first_rows, 3), {"a": (7, 2)})
    assert calls == [4, 3, 3]


def test_functions_of_dicts():
    def function(tensors):
        gate, up = tensors["both"].chunk(2)
        return {"gate": gate, "up": up.contiguous(), "other": tensors["other"]}

    layouts = record_all(function, {"both": (6, 2), "other": (3,)})
    assert {name: shape for name, (shape, _) in layouts.items()} == {"gate": (3, 2), "up": (3, 2), "other": (3,)}
    assert layouts["up"][1][0].name == "both"
    assert layouts["up"][1][0].source == Box((3, 0), (3, 2))


@pytest.mark.parametrize("split", ["rows", "columns", "halves", "none"])
def test_cut(split):
    x = torch.arange(48).view(8, 6)
    parts = [cut(x, split, rank, 2) for rank in range(2)]
    expected = {
        "rows": [x[:4], x[4:]],
        "columns": [x[:, :3], x[:, 3:]],
        "halves": [torch.cat([x[:2], x[4:6]]), torch.cat([x[2:4], x[6:]])],
        "none": [x, x],
    }
    assert all(torch.equal(a, b) for a, b in zip(parts, expected[split], strict=True))


@pytest.mark.parametrize(("shape", "split"), [((7, 6), "rows"), ((8, 7), "columns"), ((6, 4), "halves"), ((8,), "columns")])
def test_a_cut_that_does_not_divide_is_refused(shape, split):
    with pytest.raises(ValueError, match="cannot be cut"):
        cut(torch.zeros(shape), split, 0, 2)


@pytest.mark.parametrize("case", ["grouped", "stack", "split dimension", "merge dimensions", "experts", "padded around"])
def test_restrict(case):
    """Check every box of a result on its own."""
    function, shapes, _ = CASES[case]
    names = [f"source {i}" for i in range(len(shapes))]
    sources = dict(zip(names, numbered(shapes), strict=True))
    real = function(*sources.values())
    shape, pieces = record(function, list(zip(names, shapes, strict=True)))
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    assert shape and all(ranges)
    for chosen in itertools.product(*ranges):
        box = Box(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen))
        built = torch.zeros(box.size, dtype=real.dtype)
        copy_pieces(built, restrict(pieces, box), reader(sources))
        assert torch.equal(built, real[box.within(whole(shape))])


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 1, 4), (2, 3, 4), (1, 5)])
def test_flat_boxes(shape):
    total = math.prod(shape)
    flat = torch.arange(total).view(shape)
    for start in range(total + 1):
        for stop in range(start, total + 1):
            boxes = flat_boxes(shape, start, stop)
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            found = [i for box in boxes for i in flat[box.within(whole(shape))].flatten().tolist()]
            assert found == list(range(start, stop))
    with pytest.raises(ValueError, match="entries"):
        flat_boxes(shape, 0, total + 1)


def test_place_converts_and_leaves_the_rest():
    target = torch.full((3, 2), 5.0, dtype=torch.bfloat16)
    _, pieces = record(lambda x: F.pad(x, (0, 0, 1, 0)), {"x": (2, 2)})
    copy_pieces(target, pieces, lambda name, box: torch.arange(4.0).view(2, 2)[box.within(whole((2, 2)))])
    assert torch.equal(target, torch.tensor([[5, 5], [0, 1], [2, 3]], dtype=torch.bfloat16))


def test_invert():
    layout = {"all": record(grouped, {"q": (8, 3), "k": (2, 3), "v": (2, 3)})[1]}
    query, key, value = numbered([(8, 3), (2, 3), (2, 3)])
    made = {"all": grouped(query, key, value)}
    for name, source in {"q": query, "k": key, "v": value}.items():
        back = torch.zeros_like(source)
        copy_pieces(back, invert(layout)[name], reader(made))
        assert torch.equal(back, source)
