"""Check that packed attention raises an error for everything that it does not support."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from pipeline.train.packed_attention import NAME, packed_attention
from pipeline.train.sequence_bounds import Packing
from tests.train import cases

LENGTHS = [0, 3, 7, 1]


def attend(query_heads=4, key_heads=2, **changes):
    generator = torch.Generator().manual_seed(0)
    batch = cases.pack(LENGTHS)
    total = len(batch.tokens)
    q = torch.randn(1, query_heads, total, 8, generator=generator)
    k, v = (torch.randn(1, key_heads, total, 8, generator=generator) for _ in range(2))
    options = {"attention_mask": None, "packing": Packing.of(batch), "scaling": 0.5, **changes}
    return (q, k, v, batch.lengths), packed_attention(torch.nn.Module(), q, k, v, **options)[0]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_each_sequence_attends_to_itself(key_heads):
    (q, k, v, lengths), ours = attend(key_heads=key_heads)
    k, v = (x.repeat_interleave(4 // key_heads, dim=1) for x in (k, v))
    pieces = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    expected = [F.scaled_dot_product_attention(*qkv, is_causal=True, scale=0.5) for qkv in pieces]
    assert ours.shape == (1, sum(lengths), 4, 8)
    assert (ours - torch.cat(expected, dim=2).transpose(1, 2)).abs().max() < 1e-6


def test_neighbours_of_equal_length_share_a_call():
    assert Packing.of(cases.pack([0, 1, 2, 4, 5, 0])).runs == ((2, 5), (1, 1), (2, 3), (1, 5))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"packing": None}, "did not pass `packing`"),
        ({"attention_mask": torch.ones(1, 1, 12, 12)}, "mask True"),
        ({"use_cache": True}, "cache True"),
        ({"sliding_window": 4}, "sliding_window 4, but its mask has None"),
        ({"position_bias": torch.zeros(4)}, "position_bias"),
    ],
)
def test_unsupported_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        attend(**change)


def test_the_silently_wrong_inputs_raise(models):
    """With transformers' own attentions each of these mixes sequences without an error."""
    model = AutoModelForCausalLM.from_pretrained(models / "llama", attn_implementation=NAME).eval()
    batch = cases.pack(LENGTHS)
    inputs = {"input_ids": batch.tokens[None], "position_ids": batch.positions[None], "use_cache": False}
    right = {**inputs, "packing": Packing.of(batch)}
    assert model(**right).logits.isfinite().all()
    with pytest.raises(ValueError, match="cache True"):
        model(**{**right, "use_cache": True})
    with pytest.raises(ValueError, match="did not pass `packing`"):
        model(**inputs)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(**right, cu_seq_lens_q=batch.cu_seqlens)
