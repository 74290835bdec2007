"""Compare flex attention on a GPU, forward and backward, with the exact block path in float32."""

import pytest
import torch

from pipeline.train import attention
from pipeline.train.attention import AttentionKind, attend
from pipeline.train.sequence_bounds import Packing
from tests.train.test_attention import KINDS, inputs, packing

pytestmark = pytest.mark.gpu
BATCHES = ((5, 150, 1, 130, 12), (400, 3, 77), (1,))  # of one graph, but for one token


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest entry."""
    return ((ours.float() - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("name", ["chunk", "soft cap", "all"])
def test_outputs_and_gradients(name, monkeypatch):
    kind, with_sinks = KINDS[name]
    calls, flex = [], attention.flex
    monkeypatch.setattr(attention, "flex", lambda *arguments: calls.append(1) or flex(*arguments))
    for lengths in BATCHES:
        packed = packing(lengths)
        packed = Packing(packed.cu_seqlens.cuda(), packed.max_length, packed.runs)
        exact = [
            x.detach().cuda().requires_grad_() for x in inputs(sum(lengths), width=64, value_width=64, dtype=torch.float32)
        ]
        rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
        found = []
        for query, key, value, sinks in (rounded, exact):
            given = sinks if with_sinks else None
            out = attend(query, key, value, packed, kind, given)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).cuda()
            leaves = [query, key, value, *([sinks] if with_sinks else [])]
            found.append([out, *torch.autograd.grad((out.float() * weights).sum(), leaves)])
        assert all(difference(ours, theirs) < 0.03 for ours, theirs in zip(*found, strict=True)), lengths
    # Sequences that no chunk divides have no kind that the variable-length kernel does not take.
    assert len(calls) == (2 if kind.softcap is None else len(BATCHES))


def test_float32_is_logged(caplog):
    attention._log_blocks.cache_clear()
    query, key, value, _ = (x.detach().cuda() for x in inputs(8, dtype=torch.float32))
    packed = packing((8,))
    attend(query, key, value, Packing(packed.cu_seqlens.cuda(), 8, packed.runs), AttentionKind(softcap=2.0))
    assert "because tensors are float32" in caplog.text
