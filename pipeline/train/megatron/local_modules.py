"""Modules of the local spec, used without TransformerEngine: RMSNorm, and causal attention over packed sequences.

Megatron-Core's local norm does not support sequence parallelism, and its local attention supports neither packed sequences nor
context parallelism, so these modules replace them. Under context parallelism rank r holds chunks r and 2 cp - 1 - r of the 2 cp
equal chunks of every sequence, which balances the work of a causal mask. Keys and values are gathered from all ranks.

Not supported, with an error: masks, biases, dropout, windows, batches that are not packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.train.packed_attention import Packing, attend


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron-Core's description of packed sequences, with the lengths on the host, so that no kernel waits for them."""

    packing: Packing | None = None  # of the padded sequences, over all context-parallel ranks
    lengths: tuple[int, ...] = ()  # of the padded sequences, over all context-parallel ranks


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron-Core's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        # An attribute of Megatron-Core: it sums the gradients of such parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


def _device(config: TransformerConfig) -> torch.device:
    on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class PackedAttention(MegatronModule):
    """Attention of a context-parallel rank: query [t, Hq, D], key [t, Hkv, D], value [t, Hkv, Dv] -> [t, Hq * Dv]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout or config.window_size or config.softmax_type != "vanilla":
            raise ValueError("packed attention supports no dropout, window or softmax offset")
        self._scale = softmax_scale
        assert pg_collection is not None
        self._group: dist.ProcessGroup = pg_collection.cp

    @override
    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> torch.Tensor:
        if attention_mask is not None or attention_bias is not None or not isinstance(packed_seq_params, PackedSequences):
            raise ValueError("packed attention expects packed sequences, without a mask or a bias")
        if self._group.size() == 1:
            assert packed_seq_params.packing is not None  # `localize` sets it
            return attend(query, key, value, packed_seq_params.packing, self._scale).flatten(1)
        return self._attend_over_ranks(query, key, value, packed_seq_params.lengths).flatten(1)

    def _attend_over_ranks(self, query, key, value, lengths: tuple[int, ...]) -> torch.Tensor:
        ranks, rank = self._group.size(), self._group.rank()
        both = torch.cat([key, value], -1).contiguous()
        both = tensor_parallel.gather_from_sequence_parallel_region(both, group=self._group)  # backward: reduce-scatter
        local_lengths = [length // ranks for length in lengths]
        of_rank = [part.split(local_lengths) for part in both.view(ranks, -1, *both.shape[1:])]
        outputs, device = [], query.device  # on the device, because a mask from the host would wait for it in every layer
        for i, (length, q) in enumerate(zip(lengths, query.split(local_lengths), strict=True)):
            chunk = length // (2 * ranks)
            halves = [part[i] for part in of_rank]
            whole = torch.cat([h[:chunk] for h in halves] + [h[chunk:] for h in reversed(halves)])
            k, v = whole.split([key.size(-1), value.size(-1)], -1)
            own = torch.arange(chunk, device=device)
            positions = torch.cat([own + c * chunk for c in (rank, 2 * ranks - 1 - rank)])
            mask = positions[:, None] >= torch.arange(length, device=device)
            outputs.append(_attend_masked(q, k, v, mask, self._scale))
        return torch.cat(outputs)

    @override
    def sharded_state_dict(self, *args, **kwargs) -> dict:
        return {}


def _attend_masked(query, key, value, mask: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Compute attention with a mask: query [t, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv], mask [t, T] -> [t, Hq, Dv]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out[0].transpose(0, 1)
