"""Modules of the local spec, used without TransformerEngine: RMSNorm, and causal attention over packed sequences.

Megatron-Core's local norm does not support sequence parallelism, and its local attention supports neither packed sequences nor
context parallelism, so these modules replace them. Under context parallelism rank r holds chunks r and 2 cp - 1 - r of the 2 cp
equal chunks of every sequence, which balances the work of a causal mask. Keys and values are gathered from all ranks.

Not supported, with an error: masks, biases, dropout, batches that are not packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from typing_extensions import override

from pipeline.train.attention import AttentionKind, attend
from pipeline.train.sequence_bounds import Packing


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron-Core's description of packed sequences, with the lengths on the host, so that no kernel waits for them."""

    packing: Packing | None = None  # of the padded sequences, over all context-parallel ranks

    @classmethod
    def of(cls, packing: Packing, on_host: bool = False) -> PackedSequences:
        """Return Megatron-Core's description of a packing. on_host: have `cu_seqlens` on the host; see `kernels_read_starts`.

        Padding counts as tokens of its sequence, so nothing lies between sequences, and `cu_seqlens_q_padded` would equal
        `cu_seqlens_q`. It is None, which TransformerEngine takes as equal. If it were a tensor, TransformerEngine up to 2.17
        would compare the two in every layer, and wait for the device (`torch.equal` in DotProductAttention.forward).
        """
        starts, longest = packing.starts_on_host() if on_host else packing.cu_seqlens, packing.max_length
        return cls(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            packing=packing,
        )


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron-Core's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=module_device(config))
        # An attribute of Megatron-Core: it sums the gradients of such parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self._zero_centered = config.layernorm_zero_centered_gamma

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self._zero_centered)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None, zero_centered: bool) -> torch.Tensor:
    """Return the RMSNorm of x [..., H], multiplied by weight [H] or, if `zero_centered`, by 1 + weight.

    1 + weight is computed in float32 or wider, as in transformers: half precision would lose most of a small weight.
    """
    if not zero_centered:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + 1, eps).to(x.dtype)


def module_device(config: TransformerConfig) -> torch.device:
    """Return the device on which modules create their parameters."""
    on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many keys a query of this layer sees, its own included; None: all keys up to its own."""
    every: Any = config.window_attn_skip_freq  # None is allowed too, against the annotation
    if config.window_size is None or not is_layer_window_attention(config.window_size, every, layer_number):
        return None
    left, right = config.window_size
    if right != 0:
        raise ValueError(f"packed attention supports no window to the right; got {config.window_size}")
    return left + 1


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
        softcap: float | None = None,
        **_,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout or config.softmax_type == "off-by-one":
            raise ValueError("packed attention supports no dropout and no fixed softmax offset")
        self._kind = AttentionKind(softmax_scale, _window(config, layer_number), softcap)
        self.softmax_offset: torch.nn.Parameter | None = None  # the sinks of this rank's heads
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(
                torch.empty(heads, dtype=config.params_dtype, device=module_device(config))
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    @override
    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> torch.Tensor:
        if attention_mask is not None or attention_bias is not None or not isinstance(packed_seq_params, PackedSequences):
            raise ValueError("packed attention expects packed sequences, without a mask or a bias")
        assert packed_seq_params.packing is not None  # `PackedSequences.of` sets it
        return attend(query, key, value, packed_seq_params.packing, self._kind, self.softmax_offset).flatten(1)

    @override
    def sharded_state_dict(self, *args, **kwargs) -> dict:
        return {}


def kernels_read_starts(stage: torch.nn.Module, config: TransformerConfig) -> bool:
    """Return whether kernels read `cu_seqlens`, as fused rotary embeddings and attention other than ours do.

    Megatron-Core's unfused rotary embeddings read `cu_seqlens` on the host. If these were on the device, each layer would wait
    for the device four times.
    """
    attention = [module for name, module in stage.named_modules() if name.endswith(".core_attention")]
    return config.apply_rope_fusion or not all(isinstance(module, PackedAttention) for module in attention)
