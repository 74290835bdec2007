"""Check flex attention against the exact block path: its mask and mathematics on the CPU, where torch compiles forward only."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torchs

from pipeline.train import attention, flex_attention
from pipeline.train.attention import AttentionKind, KernelSpans, attend
from pipeline.train.kernels import missing_dependency
from tests.train.test_attention import KINDS, differences, inputs, packing

LENGTHS = (5, 150, 1, 130, 12)  # more than two blocks, whose borders are inside sequences


def dense(spans: KernelSpans, kind: AttentionKind) -> torch.Tensor:
    """Return which keys the queries see by the kind's definition, [T, K] bool."""
    masks = []
    for queries, keys in zip(spans.queries.diff().tolist(), spans.keys.diff().tolist(), strict=True):
        masks.append(kind.mask(torch.arange(keys - queries, keys), torch.arange(keys)))
    return torch.block_diag(*(mask.float() for mask in masks)).bool()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["full", "window", "window of one", "chunk"])
def test_the_mask_of_each_kind(name, ranks):
    kind, _ = KINDS[name]
    lengths = tuple(4 * length for length in LENGTHS)
    for rank in range(ranks):
        spans = KernelSpans.of(packing(lengths, SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)))
        expected = dense(spans, kind)
        count, keys = expected.shape
        low, high = flex_attention.visible(spans.queries, spans.keys, count, kind)
        columns = torch.arange(keys)
        assert torch.equal((columns >= low[:, None]) & (columns <= high[:, None]), expected)

        found = flex_attention.block_mask(low, high, keys)
        assert found.full_kv_num_blocks is not None and found.full_kv_indices is not None
        rows = [flex_attention.BLOCK * n for n in (-(-count // flex_attention.BLOCK), -(-keys // flex_attention.BLOCK))]
        padded = torch.zeros(*rows, dtype=torch.bool)
        padded[:count, :keys] = expected
        blocks = padded.unflatten(0, (-1, flex_attention.BLOCK)).unflatten(2, (-1, flex_attention.BLOCK)).transpose(1, 2)
        for row, of_keys in enumerate(blocks):
            partial, full = (
                indices[0, 0, row, : numbers[0, 0, row]].tolist()
                for numbers, indices in (
                    (found.kv_num_blocks, found.kv_indices),
                    (found.full_kv_num_blocks, found.full_kv_indices),
                )
            )
            needed = {number for number, block in enumerate(of_keys) if block.any()}
            assert set(partial).isdisjoint(full) and needed <= {*partial, *full}
            real = min(flex_attention.BLOCK, count - row * flex_attention.BLOCK)
            assert all(of_keys[number][:real].all() for number in full)
        if name == "window" and ranks == 1:  # a window's queries read few blocks
            assert found.kv_num_blocks.max() <= 3 and found.full_kv_num_blocks.max() == 0


def computed(names, lengths, dtype, width):
    """Yield (name, flex attention, block path, leaves) of each kind."""
    for name in names:
        kind, with_sinks = KINDS[name]
        query, key, value, sinks = inputs(sum(lengths), width=width, value_width=width, dtype=dtype)
        if not torch.is_grad_enabled():  # compiled, torch refuses leaves with gradients on the CPU
            query, key, value = query.detach(), key.detach(), value.detach()
        given, packed = (sinks if with_sinks else None), packing(lengths)
        ours = flex_attention.flex(query, key, value, KernelSpans.of(packed)[:2], kind, given)
        yield name, ours, attend(query, key, value, packed, kind, given), [query, key, value, sinks]


def test_outputs_and_gradients_by_torchs_definition(monkeypatch):
    """Uncompiled, torch computes all scores, also gradients, which its check of devices refuses on the CPU."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_compiled_kernel", lambda: torchs.flex_attention)
    names = ("chunk", "soft cap", "all")
    found = {name: differences(*made) for name, *made in computed(names, LENGTHS, torch.float64, 8)}
    assert found.keys() == {*names} and max(found.values()) < 1e-12, found


@pytest.mark.full
@pytest.mark.skipif(missing_dependency(torch.device("cpu")) is not None, reason="Inductor cannot compile here")
def test_the_compiled_forward_pass():
    """One graph computes batches of other lengths too. On the CPU it has no log-sum-exp, so no sinks."""
    with torch.no_grad():
        for lengths in (LENGTHS, (400, 3, 77)):
            made = computed(("chunk", "soft cap"), lengths, torch.float32, 16)
            found = {name: (ours - theirs).abs().max() for name, ours, theirs, _ in made}
            assert len(found) == 2 and max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("kind", "dtype", "widths", "chosen"),
    [
        (AttentionKind(), torch.bfloat16, (64, 64), "varlen"),
        (AttentionKind(softcap=50.0), torch.bfloat16, (64, 64), "flex"),
        (AttentionKind(chunk=8), torch.float16, (512, 512), "flex"),
        (AttentionKind(softcap=50.0), torch.float32, (64, 64), "tensors are float32"),
        (AttentionKind(softcap=50.0), torch.bfloat16, (8, 8), "heads are narrower than 16"),
        (AttentionKind(), torch.bfloat16, (192, 128), "query heads are 192 wide and value heads 128"),
    ],
)
def test_the_choice_on_a_gpu(kind, dtype, widths, chosen, monkeypatch, caplog):
    monkeypatch.setattr(flex_attention, "_missing", lambda _: None)
    attention._log_blocks.cache_clear()
    with FakeTensorMode():
        query, value = (torch.empty(4, 2, width, device="cuda", dtype=dtype) for width in widths)
    by_kernel = attention._fits_kernel(query, value, kind)
    by_flex = not by_kernel and all(attention._fits_flex(query, value, kind) for _ in range(2))
    assert (by_kernel, by_flex) == (chosen == "varlen", chosen == "flex")
    logged = [record.message for record in caplog.records if "block by block" in record.message]
    assert len(logged) == (chosen not in ("varlen", "flex")) and all(line.endswith(chosen) for line in logged)


def test_a_gpu_without_a_compiler_is_logged(monkeypatch):
    monkeypatch.setattr(flex_attention, "_missing", lambda _: "C compiler")
    tensor = torch.empty(4, 2, 64, dtype=torch.bfloat16)
    assert flex_attention.lacking(tensor, tensor) == "there is no C compiler"
