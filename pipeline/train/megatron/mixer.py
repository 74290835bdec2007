"""The common part of state spaces and delta nets: mixers that replace attention and carry a state along the sequence.

A joint projection gives channels to convolve along the sequence, one or two numbers for each head, and a gate. The mixer
convolves and mixes, applies a norm with the gate, and projects. Convolution and state start anew at each sequence. Tensor
parallelism cuts heads and groups.

Under context parallelism, a rank first holds some tokens of all heads. Ranks exchange these, so that each rank computes whole
sequences for its share of the heads. Then they exchange the outputs, so that each rank has all heads for its own tokens. Ranks
with heads of the same group all compute the parts that the group shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.models.mixers import DeltaNet, StateSpace
from pipeline.train.context_parallel import ExchangeRows
from pipeline.train.megatron.local_modules import PackedSequences, module_device
from pipeline.train.sequence_bounds import Packing, sequence_order, to_device

Sizes = TypeVar("Sizes", StateSpace, DeltaNet)


def by_runs(compute: Callable[..., torch.Tensor], packing: Packing, *tensors: torch.Tensor) -> torch.Tensor:
    """Apply `compute` to each run of neighbouring sequences of equal length, and return the results as [T, ...].

    tensors: [T, ...] each. compute: gets the run's part of each tensor as [S, L, ...], and returns [S, L, ...].
    """
    tokens = [count * length for count, length in packing.runs]
    pieces = zip(*(tensor.split(tokens) for tensor in tensors), strict=True)
    rows = ([tensor.unflatten(0, run) for tensor in piece] for run, piece in zip(packing.runs, pieces, strict=True))
    return torch.cat([compute(*tensors).flatten(0, 1) for tensors in rows])


def chunks(tensor: torch.Tensor, padding: int, size: int) -> torch.Tensor:
    """Append `padding` zeros along L of [S, L, ...], and cut it into chunks of `size` tokens: [S, K, size, ...]."""
    widths = (0, 0) * (tensor.dim() - 2)
    return F.pad(tensor, (*widths, 0, padding)).unflatten(1, (-1, size))


def decay_between(decay: torch.Tensor) -> torch.Tensor:
    """Return exp(decay[j + 1] + ... + decay[i]) for j <= i, else 0: [..., Q] -> [..., Q (i), Q (j)].

    Each entry is the sum of its own terms. A difference of two cumulative sums would have a rounding error that grows with the
    length.
    """
    size = decay.size(-1)
    rows = decay[..., None].expand(*decay.shape, size)
    lower = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril(-1)
    sums = rows.masked_fill(~lower, 0).cumsum(-2)
    return sums.masked_fill(~(lower | torch.eye(size, dtype=torch.bool, device=decay.device)), -torch.inf).exp()


@dataclass(frozen=True)
class HeadShare:
    """The heads that a context-parallel rank computes: their rows of the mixer's parameters, and the number of their groups."""

    channels: torch.Tensor  # [C'] int64: of the convolution
    heads: torch.Tensor  # [R'] int64
    groups: int

    @staticmethod
    def of(sizes: StateSpace | DeltaNet, tensor_ranks: int, ranks: int, rank: int, device: torch.device) -> HeadShare:
        """Return the share of context-parallel rank `rank`, of `ranks` ranks."""
        count, groups = sizes.heads // tensor_ranks, sizes.groups // tensor_ranks
        heads = torch.arange(count, device=device).chunk(ranks)[rank]
        first, last = (int(head) * groups // count for head in (heads[0], heads[-1]))
        spans, start = [], 0
        for part, by_head in zip(sizes.convolved, sizes.by_head, strict=True):
            size = part // (sizes.heads if by_head else sizes.groups)
            low, high = (int(heads[0]), int(heads[-1])) if by_head else (first, last)
            spans.append((start + low * size, start + (high + 1) * size))
            start += part // tensor_ranks
        channels = torch.cat([torch.arange(*span, device=device) for span in spans])
        return HeadShare(channels, heads, last + 1 - first)


def check_ranks(sizes: StateSpace | DeltaNet, tensor_ranks: int, ranks: int) -> None:
    """Raise ValueError if groups cannot be divided over tensor-parallel ranks, or heads over context-parallel `ranks`."""
    if sizes.groups % tensor_ranks or sizes.heads % sizes.groups:
        raise ValueError(f"{tensor_ranks} tensor-parallel ranks do not divide a mixer of {sizes.groups} groups")
    heads, groups = sizes.heads // tensor_ranks, sizes.groups // tensor_ranks
    if heads % ranks or (groups % ranks and ranks % groups):
        raise ValueError(f"{ranks} context-parallel ranks cannot share a mixer with {heads} heads and {groups} groups")


@dataclass
class MixerSubmodules:
    """The modules of a mixer's projections."""

    in_proj: Any
    out_proj: Any


class Mixer(MegatronModule, Generic[Sizes]):
    """A module that replaces attention: hidden states [t, 1, H] -> ([t, 1, H], None)."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int,
        sizes: Sizes,
        pg_collection: Any,
        **_,
    ) -> None:
        super().__init__(config=config)
        self._sizes: Sizes = sizes
        self._tensor = pg_collection.tp
        self._ranks: int = self._tensor.size()
        check_ranks(sizes, self._ranks, config.context_parallel_size)
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
        self.conv_weight = self._cut(sum(sizes.convolved), 1, sizes.kernel)
        self.dt_bias, self.A_log = self._cut(sizes.heads), self._cut(sizes.heads)

    def _whole(self, *shape: int) -> torch.nn.Parameter:
        """Return a new, uninitialized parameter of this shape."""
        return torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=module_device(self.config)))

    def _cut(self, rows: int, *shape: int) -> torch.nn.Parameter:
        """Return this rank's part of a new, uninitialized parameter [rows, *shape], whose rows tensor parallelism cuts."""
        parameter = self._whole(rows // self._ranks, *shape)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    @override
    def forward(self, hidden_states, *_, packed_seq_params=None, **__):
        if not isinstance(packed_seq_params, PackedSequences) or packed_seq_params.packing is None:
            raise ValueError(f"{type(self).__name__} expects packed sequences")
        projected, _ = self.in_proj(hidden_states)
        convolved, of_heads, gate = self.parts(projected[:, 0])
        packing = packed_seq_params.packing
        mix = self.mix if packing.context is None else self._mix_heads
        output, _ = self.out_proj(self.norm(mix(convolved, of_heads, packing), gate)[:, None])
        return output, None

    def _mix_heads(self, convolved: torch.Tensor, of_heads: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Return the outputs [t, R D] of all heads for this context-parallel rank's t tokens."""
        context = packing.context
        assert context is not None
        ranks = context.group.size()
        shares = [HeadShare.of(self._sizes, self._ranks, ranks, rank, convolved.device) for rank in range(ranks)]
        sent = torch.stack([torch.cat([convolved[:, s.channels], of_heads[..., s.heads].flatten(1)], -1) for s in shares])
        mine = shares[context.group.rank()]
        order = sequence_order(context.lengths, ranks).to(convolved.device, non_blocking=True)
        gathered = ExchangeRows.apply(context.group, None, None, sent)[0].flatten(0, 1)[order]  # [T, C' + n R']
        inputs, numbers = gathered.tensor_split([len(mine.channels)], -1)
        numbers = numbers.unflatten(-1, (-1, len(mine.heads)))
        mixed = self.mix(inputs, numbers, replace(packing, context=None), mine)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=order.device)
        (returned,) = ExchangeRows.apply(context.group, None, None, mixed[rows].unflatten(0, (ranks, -1)))  # [ranks, t, R' D]
        return returned.transpose(0, 1).flatten(1)

    def parts(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (channels to convolve [t, C], n numbers for each head [t, n, R], gate [t, R D]) of a projection [t, rows]."""
        raise NotImplementedError

    def mix(
        self, convolved: torch.Tensor, of_heads: torch.Tensor, packing: Packing, share: HeadShare | None = None
    ) -> torch.Tensor:
        """Return the outputs of heads [t, R D]. share: the heads to compute; None: all heads of this tensor-parallel rank."""
        raise NotImplementedError

    def norm(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the norm of the heads' outputs `mixed` [t, R D], with the gate [t, R D] applied."""
        raise NotImplementedError

    @override
    def sharded_state_dict(self, *args, **kwargs) -> dict:
        return {}


# ---- the convolution --------------------------------------------------------------------------------------------------------


def token_positions(packing: Packing) -> torch.Tensor:
    """Return the position of each token in its sequence, [T] int64 on the device."""
    lengths = torch.tensor([length for count, length in packing.runs for _ in range(count)])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return to_device(torch.arange(len(starts)) - starts, packing.cu_seqlens.device)


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """Convolve each channel with its past in its sequence, then apply SiLU: x [T, C], weight [C, K], bias [C] -> [T, C].

    positions [T]: each token's position in its sequence. weight[:, K - 1] multiplies the token itself. Sums are in float32 or
    wider and are rounded once, as in the kernels of engines.
    """
    return _Convolution.apply(x, weight, bias, positions)


class _Convolution(torch.autograd.Function):
    """Computes `convolve`, and keeps only the inputs for the backward pass.

    The float32 sums of each tap would take several times the inputs' memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias, positions)
        return F.silu(_total(x, weight, bias, positions)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, positions = ctx.saved_tensors
        total = _total(x, weight, bias, positions)
        gate = total.sigmoid()
        grad = grad * gate * (1 + total * (1 - gate))  # the derivative of SiLU
        of_x = grad * weight[:, -1]
        of_taps = [(grad * x).sum(0)]
        for back in range(1, weight.size(1)):
            within = grad[back:] * (positions[back:] >= back)[:, None]  # 0 where the tap is in another sequence
            of_x[:-back] += within * weight[:, -1 - back]
            of_taps.append((within * x[:-back]).sum(0))
        of_weight = torch.stack(of_taps[::-1], 1).to(weight.dtype)
        return of_x.to(x.dtype), of_weight, None if bias is None else grad.sum(0).to(bias.dtype), None


def _total(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """Return the convolution [T, C] before SiLU, in float32, or in float64 if x is float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    total = x * weight[:, -1]
    for back in range(1, weight.size(1)):
        total[back:] += x[:-back] * (positions[back:] >= back)[:, None] * weight[:, -1 - back]
    return total if bias is None else total + bias
