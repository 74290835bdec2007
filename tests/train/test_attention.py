"""Check every kind of attention against its definition, with a mask of the whole sequence, in float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.train import attention, attention_blocks
from pipeline.train.attention import AttentionKind, KernelSpans, VarlenWithSinks, attend
from pipeline.train.sequence_bounds import Packing
from tests import torch_builds
from tests.device.pretended import without_device_guards

LENGTHS = (5, 5, 1, 23, 12, 12)
KINDS = {
    "full": (AttentionKind(0.3), False),
    "window": (AttentionKind(0.3, window=4), False),
    "window of one": (AttentionKind(window=1), False),
    "window as long as the longest": (AttentionKind(window=23), False),
    "chunk": (AttentionKind(chunk=5), False),
    "soft cap": (AttentionKind(0.3, softcap=0.7), False),
    "sinks": (AttentionKind(), True),
    "all": (AttentionKind(0.4, window=6, softcap=0.9), True),
}


def packing(lengths=LENGTHS, group=None) -> Packing:
    return Packing.of_lengths(lengths, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), group)


def inputs(total: int, heads=4, key_heads=2, width=8, value_width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (total, heads, width), (total, key_heads, width), (total, key_heads, value_width), (heads,)
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def defined(query, key, value, lengths, kind: AttentionKind, sinks):
    """Return attention by its definition, a sequence at a time."""
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (kind.scale or q.size(-1) ** -0.5)
        if kind.softcap:
            scores = kind.softcap * (scores / kind.softcap).tanh()
        for i, j in itertools.product(range(len(q)), range(len(q))):
            far = kind.window is not None and j <= i - kind.window
            other = kind.chunk is not None and i // kind.chunk != j // kind.chunk
            if j > i or far or other:
                scores[:, i, j] = -torch.inf
        exponents = scores.exp()
        total = exponents.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        outputs.append(torch.einsum("hqk,khd->qhd", exponents / total, v))
    return torch.cat(outputs)


def differences(ours, theirs, leaves) -> float:
    """Return the largest difference of outputs and of gradients."""
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    found = [torch.autograd.grad((x * weights).sum(), leaves, allow_unused=True) for x in (ours, theirs)]
    pairs = [(ours, theirs), *((a, b) for a, b in zip(*found, strict=True) if a is not None or b is not None)]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("block", [4, 256])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_its_definition(name, block, monkeypatch):
    monkeypatch.setattr(attention_blocks, "_BLOCK", block)
    kind, with_sinks = KINDS[name]
    query, key, value, sinks = inputs(sum(LENGTHS), value_width=12)
    given = sinks if with_sinks else None
    ours = attend(query, key, value, packing(), kind, given)
    theirs = defined(query, key, value, LENGTHS, kind, given)
    assert differences(ours, theirs, [query, key, value, sinks]) < 1e-12
    if name not in ("full", "window as long as the longest"):
        assert (theirs - defined(query, key, value, LENGTHS, AttentionKind(kind.scale), None)).abs().max() > 0.1


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa=None, **others):
    """Compute what the CUDA kernel does by its definition: a span's last query sees its last key."""
    counts = [starts.diff().tolist() for starts in (cu_seq_q, cu_seq_k, cu_seq_k)]
    assert (max(counts[0]), max(counts[1])) == (max_q, max_k) and not any(others.values())
    assert enable_gqa in (None, query.size(1) != key.size(1))  # torch refuses fewer key heads without it, where it exists
    outputs = []
    for q, k, v in zip(*(x.split(n) for x, n in zip((query, key, value), counts, strict=True)), strict=True):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        position = torch.arange(len(q))[:, None] + len(k) - len(q)
        far = torch.arange(len(k)) - position
        hidden = (far > window_size[1]) | (-far > window_size[0] if window_size[0] >= 0 else False)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.size(-1) ** -0.5)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


@pytest.fixture(params=torch_builds.BUILDS.values(), ids=torch_builds.BUILDS)
def build(request, monkeypatch) -> torch_builds.Build:
    """Return a build of torch, with the kernel behind its varlen_attn."""
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_attn", torch_builds.function(request.param, kernel))
    return request.param


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("name", ["full", "window", "window of one"])
def test_the_kernel_of_each_build(name, key_heads, build):
    query, key, value, _ = inputs(sum(LENGTHS), key_heads=key_heads)
    kind, _ = KINDS[name]
    theirs = defined(query, key, value, LENGTHS, kind, None)
    assert differences(attend(query, key, value, packing(), kind), theirs, [query, key, value]) < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_over_context_parallel_ranks(name, ranks, monkeypatch):
    monkeypatch.setattr(attention_blocks, "_BLOCK", 4)
    assert difference_over_ranks(name, ranks, monkeypatch) < 1e-12


@pytest.mark.parametrize("name", ["full", "window", "window of one"])
def test_the_kernel_over_context_parallel_ranks(name, build, monkeypatch):
    assert difference_over_ranks(name, 3, monkeypatch) < 1e-12


def difference_over_ranks(name: str, ranks: int, monkeypatch) -> float:
    """Give each rank in turn its chunks, and the gathered keys and values of all; return the largest difference."""
    kind, with_sinks = KINDS[name]
    lengths = tuple(4 * ranks * n for n in (1, 3, 2))
    query, key, value, sinks = inputs(sum(lengths))
    given = sinks if with_sinks else None
    rows = [attention_rows(lengths, ranks, rank) for rank in range(ranks)]
    monkeypatch.setattr(attention.GatherRows, "apply", lambda mine, group: torch.cat([key, value], -1)[torch.cat(rows)])
    outputs = []
    for rank, own in enumerate(rows):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        outputs.append(attend(query[own], key[own], value[own], packing(lengths, group), kind, given))
    ours = torch.empty_like(torch.cat(outputs)).index_copy(0, torch.cat(rows), torch.cat(outputs))
    theirs = defined(query, key, value, lengths, kind, given)
    return differences(ours, theirs, [query, key, value, sinks])


def attention_rows(lengths, ranks: int, rank: int) -> torch.Tensor:
    starts = list(itertools.accumulate(lengths, initial=0))
    chunks = [(start, length // (2 * ranks)) for start, length in zip(starts, lengths, strict=False)]
    return torch.cat([torch.arange(n) + s + c * n for s, n in chunks for c in (rank, 2 * ranks - 1 - rank)])


@pytest.mark.parametrize("window", [(-1, 0), (3, 0)])
def test_sinks_by_the_normalizer_of_the_kernel(window, build, monkeypatch):
    """Compute what the CUDA kernel does by its definition: output, normalizer, and gradients from those that it is given."""
    query, key, value, sinks = inputs(sum(LENGTHS), dtype=torch.float32)
    kind = AttentionKind(0.3, window=None if window[0] < 0 else window[0] + 1)

    def scores(q, k):
        mask = torch.block_diag(*(kind.mask(torch.arange(n), torch.arange(n)).float() for n in LENGTHS)).bool()
        found = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3
        return found.masked_fill(~mask, -torch.inf)

    def forward(q, k, v, *_):
        s = scores(q, k)
        return torch.einsum("hqk,khd->qhd", s.softmax(-1), v.repeat_interleave(2, 1)), s.logsumexp(-1), torch.zeros(2)

    def backward(grad, q, k, v, out, lse, *_):
        p = (scores(q, k) - lse[:, :, None]).exp()
        of_p = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(2, 1))
        of_s = p * (of_p - (grad * out).sum(-1).T[:, :, None]) * 0.3
        of_k, of_v = torch.einsum("hqk,qhd->khd", of_s, q), torch.einsum("hqk,qhd->khd", p, grad)
        both = (x.unflatten(1, (2, 2)).sum(2) for x in (of_k, of_v))
        return torch.einsum("hqk,khd->qhd", of_s, k.repeat_interleave(2, 1)), *both

    theirs = defined(query, key, value, LENGTHS, kind, sinks)
    with torch_builds.operators(build, forward, backward) as operators:
        monkeypatch.setattr(torch.ops, "torch_attn", operators)
        assert differences(attend(query, key, value, packing(), kind, sinks), theirs, [query, key, value, sinks]) < 2e-5


class Context:
    """Stands in for torch's context between the two passes."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_this_builds_operators_take_the_arguments(window, key_heads):
    """Check shapes only: the tensors pretend to be on a GPU, for which torch has the kernel."""
    with without_device_guards(), FakeTensorMode():
        query, key, value = (torch.empty(8, n, 64, dtype=torch.bfloat16, device="cuda") for n in (4, key_heads, key_heads))
        sinks = torch.empty(4, dtype=torch.bfloat16, device="cuda")
        packed = Packing.of_lengths((3, 5), torch.empty(3, dtype=torch.int32, device="cuda"))
        for given in (None, sinks):
            assert attend(query, key, value, packed, AttentionKind(window=window), given).shape == query.shape
        between = Context()  # torch computes the gradients of tensors on a GPU only where there is one
        out = VarlenWithSinks.forward(between, query, key, value, sinks, KernelSpans.of(packed), None, (window or -1, 0))
        gradients = VarlenWithSinks.backward(between, torch.empty_like(out))
        assert [grad.shape for grad in gradients[:4]] == [x.shape for x in (query, key, value, sinks)]


QUERIES = {  # operator -> place of the queries among its arguments; the keys follow
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 0,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 1,
}


class Scores(TorchDispatchMode):
    """Counts the scores that attention computes for a head, forward and backward: queries times keys."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (at := QUERIES.get(func)) is not None:
            self.count += args[at].size(-2) * args[at + 1].size(-2)
        return func(*args, **(kwargs or {}))


def test_a_small_window_costs_less_than_full_attention():
    query, key, value, _ = inputs(8192, width=16, value_width=16, dtype=torch.float32)
    counts = []
    for kind in (AttentionKind(window=64), AttentionKind()):
        with Scores() as scores:
            attend(query, key, value, packing((8192,)), kind).sum().backward()
        counts.append(scores.count)
    assert 0 < counts[0] < counts[1] / 20 and counts[1] == 2 * 8192**2
