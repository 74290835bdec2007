"""The causal convolution of packed sequences that precedes state spaces and delta nets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pipeline.train.sequence_bounds import Packing, to_device


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
