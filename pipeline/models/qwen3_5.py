"""Qwen3.5's language model, dense and as a mixture of experts: gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from typing import Any

from pipeline.models.mixers import DeltaNet


def delta_net(config: Any) -> DeltaNet:
    """Return the sizes of the gated delta nets. config: of transformers, or of `pipeline.models.sizes`."""
    return DeltaNet(
        groups=config.linear_num_key_heads,
        heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        epsilon=config.rms_norm_eps,
    )
