"""The loss and metrics of one step, from the microbatches' shares."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeline.types import LossOutput


def reduce_outputs(
    outputs: Sequence[LossOutput], counts: bool, group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """{"loss": ..., metric: ...} over all microbatches and all ranks of `group`, added up in float64.

    counts: whether this rank's shares count; False where another rank of the group holds the same. Metrics whose name ends in
    `_max` or `_min` are combined by that.
    """
    names = sorted(outputs[0].metrics)
    extreme = [name for name in names if name.endswith(("_max", "_min"))]
    summed = [name for name in names if name not in extreme]
    values = torch.stack([torch.stack([o.loss, *(o.metrics[n] for n in summed)]) for o in outputs]).to(device).double().sum(0)
    if not counts:
        values.zero_()
    dist.all_reduce(values, group=group)
    result = dict(zip(["loss", *summed], values.tolist(), strict=True))
    if extreme:
        sign = torch.tensor([-1.0 if name.endswith("_min") else 1.0 for name in extreme], dtype=torch.float64, device=device)
        peaks = torch.stack([torch.stack([o.metrics[name] for name in extreme]) for o in outputs]).to(device).double()
        peaks = (peaks * sign).amax(0)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        result |= dict(zip(extreme, (peaks * sign).tolist(), strict=True))
    return result


def broadcast_record(record: dict[str, float], source: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """The record of rank `source` of `group`, to the last bit, on all of its ranks."""
    body = json.dumps(record).encode() if group.rank() == source else b""
    length = torch.tensor([len(body)], device=device)
    dist.broadcast(length, group_src=source, group=group)
    payload = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if body:
        payload.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    dist.broadcast(payload, group_src=source, group=group)
    return json.loads(payload.cpu().numpy().tobytes())
