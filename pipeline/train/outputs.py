"""Reduce the loss and metrics of microbatches to the loss and metrics of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from pipeline.types import BIN_EDGES, LossOutput, Outputs

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
SMALLEST_VARIANCE = 1e-8


def reduce_outputs(
    outputs: Sequence[LossOutput], counts: bool, group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Return {"loss": ..., metric: ...} over all microbatches and all ranks of `group`, summed in float64. Collective.

    counts: whether this rank's values count; False if another rank of the group has the same values. A metric's name determines
    how it is reduced: see `LossOutput`.
    """
    names = sorted(outputs[0].metrics)
    extreme = [name for name in names if name.endswith(("_max", "_min"))]
    summed = [name for name in names if name not in extreme]
    sizes = [1, *(outputs[0].metrics[name].numel() for name in summed)]
    rows = [torch.cat([o.loss.detach().reshape(1), *(o.metrics[name].reshape(-1) for name in summed)]) for o in outputs]
    values = torch.stack(rows).to(device).double().sum(0)
    if not counts:
        values.zero_()
    dist.all_reduce(values, group=group)
    result = {}
    for name, part in zip(["loss", *summed], values.cpu().split(sizes), strict=True):
        result |= _numbers(name, part.numpy())
    if extreme:
        sign = torch.tensor([-1.0 if name.endswith("_min") else 1.0 for name in extreme], dtype=torch.float64, device=device)
        peaks = torch.stack([torch.stack([o.metrics[name] for name in extreme]) for o in outputs]).to(device).double()
        peaks = (peaks * sign).amax(0)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        result |= dict(zip(extreme, (peaks * sign).tolist(), strict=True))
    return result


def _numbers(name: str, sums: np.ndarray) -> dict[str, float]:
    """Return {logged name: value} of a metric that is reduced by a sum. sums: the metric's entries, summed over all batches."""
    if name.endswith("_histogram"):
        return {f"{name.removesuffix('_histogram')}_{q}": value for q, value in quantiles(sums).items()}
    if name.endswith("_moments"):
        return {name.removesuffix("_moments"): explained_variance(*sums.tolist())}
    if name.endswith("_weighted"):
        return {name.removesuffix("_weighted"): float(sums[0] / sums[1]) if sums[1] else float("nan")}
    return {name: float(sums.item())}


def quantiles(shares: np.ndarray) -> dict[str, float]:
    """Return {name: quantile of x} from a histogram of log x, whose bins have the shares [BINS]; nan if it is empty.

    A quantile is the middle of its bin, or the only edge of an open bin.
    """
    middles = np.exp(np.concatenate([BIN_EDGES[:1], (BIN_EDGES[:-1] + BIN_EDGES[1:]) / 2, BIN_EDGES[-1:]]))
    below = np.cumsum(shares)
    if below[-1] == 0:
        return dict.fromkeys(QUANTILES, float("nan"))
    return {name: float(middles[np.searchsorted(below, q * below[-1])]) for name, q in QUANTILES.items()}


def explained_variance(target: float, target_square: float, residual: float, residual_square: float) -> float:
    """Return 1 - Var residual / Var target. Below 0, the prediction is worse than a constant.

    The arguments are the means of target and residual, and of their squares.
    """
    variance = target_square - target**2
    return 1 - (residual_square - residual**2) / max(variance, SMALLEST_VARIANCE)


def broadcast_outputs(outputs: list[Outputs], stages: dist.ProcessGroup) -> None:
    """Copy the last pipeline stage's outputs to the other stages, one field of all batches at a time. Collective."""
    for tensors in zip(*(output.tensors() for output in outputs), strict=True):
        flat = torch.cat(tensors)
        dist.broadcast(flat, group_src=stages.size() - 1, group=stages)
        for tensor, part in zip(tensors, flat.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.copy_(part)


def broadcast_record(record: dict[str, float], source: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """Return the record of rank `source` of `group` on all ranks of the group, bitwise equal. Collective."""
    body = json.dumps(record).encode() if group.rank() == source else b""
    length = torch.tensor([len(body)], device=device)
    dist.broadcast(length, group_src=source, group=group)
    payload = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if body:
        payload.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    dist.broadcast(payload, group_src=source, group=group)
    return json.loads(payload.cpu().numpy().tobytes())
