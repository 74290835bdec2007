"""Mamba-2 over packed sequences (https://arxiv.org/abs/2405.21060): its scan, and its mixer for Megatron-Core.

Per head, with input x_t [P], B_t and C_t [N] (shared by the heads of a group), step s_t > 0 and A < 0:

    h_t = exp(s_t A) h_{t-1} + s_t x_t B_t^T,    y_t = h_t C_t + D x_t        h [P, N], 0 before the first token of a sequence

Megatron-Core's own mixer needs mamba_ssm and causal_conv1d. Where these are installed, their kernels compute the same on a GPU;
elsewhere torch does.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.models.mixers import StateSpace
from pipeline.train.megatron.mixer import (
    HeadShare,
    Mixer,
    MixerSubmodules,
    by_runs,
    chunks,
    convolve,
    decay_between,
    token_positions,
)
from pipeline.train.sequence_bounds import Packing


def scan(
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    packing: Packing,
    chunk: int,
) -> torch.Tensor:
    """Return y [T, H, P] of x [T, H, P], step [T, H], a and d [H], b and c [T, G, N], in float32.

    Neighbouring sequences of equal length are computed together. chunk: the number of tokens that are computed together by
    matrix products.
    """
    x, step, a, b, c = (tensor.float() for tensor in (x, step, a, b, c))
    result = by_runs(lambda x, step, b, c: _chunked_scan(x, step, a, b, c, chunk), packing, x, step, b, c)
    return result + d.float()[:, None] * x


def _chunked_scan(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Return h C [S, L, H, P] of S sequences of equal length L.

    x [S, L, H, P], step [S, L, H], a [H], b and c [S, L, G, N].
    """
    length, groups = x.size(1), b.size(2)
    size = min(chunk, length)
    padding = -length % size
    decay = a * step
    weighted = x * step[..., None]
    # S sequences, K chunks of Q tokens, G groups of R heads
    weighted, decay = (chunks(tensor, padding, size).unflatten(3, (groups, -1)) for tensor in (weighted, decay))
    b, c = (chunks(tensor, padding, size) for tensor in (b, c))
    total = decay.cumsum(2)  # [S, K, Q, G, R], from a chunk's start to each of its tokens
    between = decay_between(decay.movedim(2, -1))  # [S, K, G, R, Q, Q]
    scores = torch.einsum("skign,skjgn->skgij", c, b)
    inside = torch.einsum("skgij,skgrij,skjgrp->skigrp", scores, between, weighted)
    # The state that each chunk adds, at its end, and the state at each chunk's start
    remaining = between[..., -1, :].permute(0, 1, 4, 2, 3)  # [S, K, Q, G, R], from each token to the chunk's end
    added = torch.einsum("skjgr,skjgn,skjgrp->skgrpn", remaining, b, weighted)
    state, starts = torch.zeros_like(added[:, 0]), []
    for k in range(added.size(1)):
        starts.append(state)
        state = total[:, k, -1].exp()[..., None, None] * state + added[:, k]
    before = torch.einsum("skign,skigr,skgrpn->skigrp", c, total.exp(), torch.stack(starts, 1))
    return (inside + before).flatten(3, 4).flatten(1, 2)[:, :length]


@cache
def _kernels() -> tuple[ModuleType, ModuleType] | None:
    """Return mamba_ssm's module with the scan and causal_conv1d, if both are installed."""
    try:
        return importlib.import_module("mamba_ssm.ops.triton.ssd_combined"), importlib.import_module("causal_conv1d")
    except ImportError:
        return None


class StateSpaceMixer(Mixer[StateSpace]):
    """A Mamba-2 mixer. The projection's one number for each head gives the step."""

    def __init__(self, config: TransformerConfig, submodules: MixerSubmodules, layer_number: int, **named: Any) -> None:
        super().__init__(config, submodules, layer_number, **named)
        sizes = self._sizes
        self.conv_bias, self.D, self.norm_weight = (
            self._cut(count) for count in (sum(sizes.convolved), sizes.heads, sizes.width)
        )

    @override
    def parts(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = (self._sizes.width, sum(self._sizes.convolved), self._sizes.heads)
        gate, convolved, step = projected.split([size // self._ranks for size in sizes], -1)
        return convolved, step[:, None], gate

    @override
    def mix(
        self, convolved: torch.Tensor, of_heads: torch.Tensor, packing: Packing, share: HeadShare | None = None
    ) -> torch.Tensor:
        step = of_heads[:, 0]
        sizes, groups = self._sizes, self._sizes.groups // self._ranks
        weight, bias = self.conv_weight[:, 0], self.conv_bias
        dt_bias, a_log, skip = self.dt_bias, self.A_log, self.D
        if share is not None:
            weight, bias, groups = weight[share.channels], bias[share.channels], share.groups
            dt_bias, a_log, skip = dt_bias[share.heads], a_log[share.heads], skip[share.heads]
        a = -a_log.float().exp()
        kernels = _kernels() if convolved.is_cuda else None
        sequence = None
        if kernels is not None:
            count = torch.arange(len(packing.cu_seqlens) - 1, dtype=torch.int32, device=convolved.device)
            lengths = packing.cu_seqlens.diff()
            sequence = torch.repeat_interleave(count, lengths, output_size=len(convolved))[None]
            # [1, C, t] with adjacent channels, which the kernel with sequences requires
            rows = convolved[None].transpose(1, 2)
            rows = kernels[1].causal_conv1d_fn(rows, weight, bias, seq_idx=sequence, activation="silu")
            convolved = rows.transpose(1, 2)[0]
        else:
            convolved = convolve(convolved, weight, bias, token_positions(packing))
        state = groups * sizes.state
        x, b, c = convolved.split([step.size(-1) * sizes.head_dim, state, state], -1)
        x, b, c = x.unflatten(-1, (-1, sizes.head_dim)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
        if kernels is not None:
            return (
                kernels[0]
                .mamba_chunk_scan_combined(
                    *(tensor[None] for tensor in (x, step)),
                    a,
                    *(tensor[None] for tensor in (b, c)),
                    sizes.chunk,
                    D=skip.float(),
                    dt_bias=dt_bias.float(),
                    dt_softplus=True,
                    dt_limit=(sizes.smallest_step, float("inf")),
                    seq_idx=sequence,
                )[0]
                .flatten(1)
            )
        step = F.softplus(step.float() + dt_bias.float()).clamp(min=sizes.smallest_step)
        return scan(x, step, a, b, c, skip, packing, sizes.chunk).flatten(1).to(convolved.dtype)

    @override
    def norm(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of each group's outputs, which are multiplied by SiLU of the gate before."""
        gated = mixed.float() * F.silu(gate.float())
        grouped = gated.unflatten(-1, (self._sizes.groups // self._ranks, -1))
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self._sizes.epsilon).flatten(1)
        return self.norm_weight * normed.to(mixed.dtype)
