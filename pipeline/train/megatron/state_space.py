"""Mamba-2 over packed sequences (https://arxiv.org/abs/2405.21060): its convolution, its scan, and its mixer for Megatron-Core.

Per head, with input x_t [P], B_t and C_t [N] (shared by the heads of a group), step s_t > 0 and A < 0:

    h_t = exp(s_t A) h_{t-1} + s_t x_t B_t^T,    y_t = h_t C_t + D x_t        h [P, N], 0 before the first token of a sequence

Convolution and state start anew at each sequence. Megatron-Core's own mixer needs mamba_ssm and causal_conv1d. Where these are
installed, their kernels compute the same on a GPU; elsewhere torch does. Tensor parallelism cuts heads and groups.

Under context parallelism, ranks exchange tokens for heads: each computes convolution and scan of whole sequences for its share
of the heads, then gets the outputs of all heads for its own tokens. Ranks with heads of one group all compute its B and C.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.models.mixers import StateSpace
from pipeline.train.context_parallel import ExchangeRows
from pipeline.train.megatron.local_modules import PackedSequences, module_device
from pipeline.train.packing import Packing, sequence_order


def token_positions(packing: Packing) -> torch.Tensor:
    """Return the position of each token in its sequence, [T] int64 on the device."""
    lengths = torch.tensor([length for count, length in packing.runs for _ in range(count)])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return (torch.arange(len(starts)) - starts).to(packing.cu_seqlens.device, non_blocking=True)


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """Convolve each channel with its past in its sequence, then apply SiLU: x [T, C], weight [C, K], bias [C] -> [T, C].

    positions [T]: of tokens in their sequences. weight[:, K - 1] multiplies the token itself.
    """
    taps = weight.size(1)
    total = x * weight[:, -1]
    for back in range(1, min(taps, len(x))):
        past = F.pad(x[:-back], (0, 0, back, 0)) * (positions >= back)[:, None]
        total = total + past * weight[:, taps - 1 - back]
    return F.silu(total if bias is None else total + bias)


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

    Neighbouring sequences of equal length are computed together. chunk: tokens that are computed by matrix products.
    """
    x, step, a, b, c = (tensor.float() for tensor in (x, step, a, b, c))
    tokens = [count * length for count, length in packing.runs]
    pieces = zip(*(tensor.split(tokens) for tensor in (x, step, b, c)), strict=True)
    found = []
    for run, piece in zip(packing.runs, pieces, strict=True):
        xs, steps, bs, cs = (tensor.unflatten(0, run) for tensor in piece)
        found.append(_chunked(xs, steps, a, bs, cs, chunk).flatten(0, 1))
    return torch.cat(found) + d.float()[:, None] * x


def _chunked(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Return h C of sequences of one length: x [S, L, H, P], step [S, L, H], a [H], b and c [S, L, G, N] -> [S, L, H, P]."""
    length, groups = x.size(1), b.size(2)
    size = min(chunk, length)
    padding = -length % size
    decay = a * step
    weighted = x * step[..., None]
    # S sequences, K chunks of Q tokens, G groups of R heads
    weighted, decay = (_chunks(tensor, padding, size).unflatten(3, (groups, -1)) for tensor in (weighted, decay))
    b, c = (_chunks(tensor, padding, size) for tensor in (b, c))
    total = decay.cumsum(2)  # [S, K, Q, G, R], from a chunk's start to each of its tokens
    between = _decay_between(decay)  # [S, K, G, R, Q, Q]
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


def _chunks(tensor: torch.Tensor, padding: int, size: int) -> torch.Tensor:
    """Pad [S, L, ...] with zeros and cut it: [S, K, size, ...]."""
    widths = (0, 0) * (tensor.dim() - 2)
    return F.pad(tensor, (*widths, 0, padding)).unflatten(1, (-1, size))


def _decay_between(decay: torch.Tensor) -> torch.Tensor:
    """Return exp(decay[j + 1] + ... + decay[i]) for j <= i, else 0: [S, K, Q, G, R] -> [S, K, G, R, Q (i), Q (j)].

    Sums of terms, not differences of sums, whose rounding would grow with the length.
    """
    size = decay.size(2)
    rows = decay.permute(0, 1, 3, 4, 2)[..., None].expand(*(-1,) * 5, size)
    lower = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril(-1)
    sums = rows.masked_fill(~lower, 0).cumsum(-2)
    return sums.masked_fill(~(lower | torch.eye(size, dtype=torch.bool, device=decay.device)), -torch.inf).exp()


@cache
def _kernels() -> tuple[ModuleType, ModuleType] | None:
    """Return mamba_ssm's module with the scan and causal_conv1d, if both are installed."""
    try:
        return importlib.import_module("mamba_ssm.ops.triton.ssd_combined"), importlib.import_module("causal_conv1d")
    except ImportError:
        return None


@dataclass(frozen=True)
class HeadShare:
    """The heads that a context-parallel rank computes: rows of the mixer's parameters, and the groups they belong to."""

    channels: torch.Tensor  # [C'] int64: of the convolution
    heads: torch.Tensor  # [R'] int64
    groups: int

    @staticmethod
    def of(sizes: StateSpace, tensor_ranks: int, ranks: int, rank: int, device: torch.device) -> HeadShare:
        """Return the share of rank `rank` of `ranks` context-parallel ranks."""
        count, groups = sizes.heads // tensor_ranks, sizes.groups // tensor_ranks
        heads = torch.arange(count, device=device).chunk(ranks)[rank]
        first, last = (int(head) * groups // count for head in (heads[0], heads[-1]))
        width, state = sizes.head_dim, sizes.state
        spans = [(int(heads[0]) * width, (int(heads[-1]) + 1) * width)]
        for start in (count * width, count * width + groups * state):
            spans.append((start + first * state, start + (last + 1) * state))
        channels = torch.cat([torch.arange(*span, device=device) for span in spans])
        return HeadShare(channels, heads, last + 1 - first)


def check_context(sizes: StateSpace, tensor_ranks: int, ranks: int) -> None:
    """Raise ValueError unless context-parallel ranks can share a state space's heads, in whole groups or within one."""
    heads, groups = sizes.heads // tensor_ranks, sizes.groups // tensor_ranks
    if heads % ranks or (groups % ranks and ranks % groups):
        raise ValueError(f"{ranks} context-parallel ranks do not divide {heads} heads of a state space in {groups} groups")


@dataclass
class MixerSubmodules:
    """The modules of a mixer's projections."""

    in_proj: Any
    out_proj: Any


class StateSpaceMixer(MegatronModule):
    """A Mamba-2 mixer in the place of attention: hidden states [t, 1, H] -> ([t, 1, H], None)."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int,
        sizes: StateSpace,
        pg_collection: Any,
        **_,
    ) -> None:
        super().__init__(config=config)
        ranks = pg_collection.tp.size()
        if sizes.groups % ranks or sizes.heads % sizes.groups:
            raise ValueError(f"{ranks} tensor-parallel ranks do not divide a state space of {sizes.groups} groups")
        check_context(sizes, ranks, config.context_parallel_size)
        self._sizes, self._ranks = sizes, ranks
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(sizes.projected),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        channels, heads = sum(sizes.convolved) // ranks, sizes.heads // ranks
        self.conv_weight, self.conv_bias = self._cut(channels, 1, sizes.kernel), self._cut(channels)
        self.dt_bias, self.A_log, self.D = self._cut(heads), self._cut(heads), self._cut(heads)
        self.norm_weight = self._cut(sizes.width // ranks)

    def _cut(self, *shape: int) -> torch.nn.Parameter:
        """Return a new parameter whose first dimension tensor parallelism cuts."""
        tensor = torch.empty(shape, dtype=self.config.params_dtype, device=module_device(self.config))
        parameter = torch.nn.Parameter(tensor)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    @override
    def forward(self, hidden_states, *_, packed_seq_params=None, **__):
        if not isinstance(packed_seq_params, PackedSequences) or packed_seq_params.packing is None:
            raise ValueError("a state space expects packed sequences")
        projected, _ = self.in_proj(hidden_states)
        gate, convolved, step = projected[:, 0].split(
            [width // self._ranks for width in (self._sizes.width, sum(self._sizes.convolved), self._sizes.heads)], -1
        )
        packing = packed_seq_params.packing
        mix = self._mix if packing.context is None else self._mix_heads
        output, _ = self.out_proj(self._norm(mix(convolved, step, packing), gate)[:, None])
        return output, None

    def _mix_heads(self, convolved: torch.Tensor, step: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Return the outputs of all heads for this context-parallel rank's tokens [t, H P]."""
        context = packing.context
        assert context is not None
        ranks = context.group.size()
        shares = [HeadShare.of(self._sizes, self._ranks, ranks, rank, step.device) for rank in range(ranks)]
        sent = torch.stack([torch.cat([convolved[:, s.channels], step[:, s.heads]], -1) for s in shares])
        mine = shares[context.group.rank()]
        order = sequence_order(context.lengths, ranks).to(step.device, non_blocking=True)
        whole = ExchangeRows.apply(sent, context.group).flatten(0, 1)[order]  # [T, C' + R']
        inputs, steps = whole.split([len(mine.channels), len(mine.heads)], -1)
        mixed = self._mix(inputs, steps, replace(packing, context=None), mine)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=order.device)
        returned = ExchangeRows.apply(mixed[rows].unflatten(0, (ranks, -1)), context.group)  # [ranks, t, R' P]
        return returned.transpose(0, 1).flatten(1)

    def _mix(
        self, convolved: torch.Tensor, step: torch.Tensor, packing: Packing, share: HeadShare | None = None
    ) -> torch.Tensor:
        """Return the outputs of heads [t, H P] from the input, B and C before the convolution, and the steps.

        share: of the heads; None for all of this tensor-parallel rank.
        """
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

    def _norm(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm of each group's gated outputs."""
        gated = mixed.float() * F.silu(gate.float())
        grouped = gated.unflatten(-1, (self._sizes.groups // self._ranks, -1))
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self._sizes.epsilon).flatten(1)
        return self.norm_weight * normed.to(mixed.dtype)

    @override
    def sharded_state_dict(self, *args, **kwargs) -> dict:
        return {}
