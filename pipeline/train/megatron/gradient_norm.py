"""Compute the norm of the whole gradient, in which each element counts once, by the layout that the model's family describes.

Megatron-Core decides which elements count by two flags of each parameter, `tensor_model_parallel` and `shared`. Its modules and
TransformerEngine's modules set these flags, some of them wrongly: TransformerEngine for MLA's replicated weights
(https://github.com/ROCm/TransformerEngine/pull/715), others for fewer groups than are used, as with experts under tensor
parallelism (https://github.com/NVIDIA/Megatron-LM/issues/5916, 6080, 6470, 7452). A norm that counts an element twice or never
changes the length of every clipped step, and nothing else shows the mistake.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import param_is_not_shared

from pipeline.train.gradients import squared_norm
from pipeline.train.host_messages import all_gather_bytes
from pipeline.train.megatron.groups import expert_tensor_group, tensor_group
from pipeline.train.megatron.local_tensors import LocalTensor

SAME = 0.01
"""The largest accepted relative difference between norms that should be equal; kernels may sum in another order."""

Gradient = tuple[torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
"""(parameter of the model, the optimizer's flat range of it, the gradient of that range)."""


def set_flags(local: Mapping[str, LocalTensor]) -> None:
    """Set the flags by which Megatron-Core decides which elements count. Call it before its optimizer copies the flags."""
    for local_tensor in local.values():
        setattr(local_tensor.tensor, "tensor_model_parallel", local_tensor.first)  # noqa: B010 - no attribute of a tensor
        setattr(local_tensor.tensor, "shared", not local_tensor.first)  # noqa: B010


class GradientNorm:
    """Computes the norm of a model's gradient over all ranks of the train component, and checks Megatron-Core's norm."""

    def __init__(self, local: Mapping[str, LocalTensor], group: dist.ProcessGroup, device: torch.device):
        """local: the tensors of this rank's stage, by global name. group: the train component."""
        self._local = {id(local_tensor.tensor): (name, local_tensor) for name, local_tensor in local.items()}
        self._group, self._device = group, device

    def norm(self, gradients: Iterable[Gradient]) -> float:
        """Return the norm of the whole gradient. Collective over the component.

        gradients: those of the ranges that this rank updates. Squares and sums are float64; Megatron-Core's are float32.
        """
        counted = (gradient for parameter, _, gradient in gradients if self._local[id(parameter)][1].first)
        mine = squared_norm(counted, self._device)
        dist.all_reduce(mine, group=self._group)
        return math.sqrt(mine.item())

    def check(self, gradients: Iterable[Gradient], norm: float, of_megatron: Callable[[], float]) -> None:
        """Raise RuntimeError, on all ranks, if gradients or Megatron-Core's norm contradict the layout of the parameters.

        Replicas must have equal gradients, Megatron-Core must count each element once, and its norm must equal `norm`, the
        result of the method `norm`. of_megatron: a function that returns Megatron-Core's norm. Collective over the component.
        """
        gradients = list(gradients)
        reference = of_megatron()
        miscounted = [
            name
            for parameter, main, _ in gradients
            for name, local_tensor in (self._local[id(parameter)],)
            if local_tensor.first
            != (param_is_not_shared(main) and tensor_parallel.param_is_not_tensor_parallel_duplicate(main))
        ]
        reports = [
            json.loads(report)
            for report in all_gather_bytes(self._group, json.dumps([miscounted, self._unequal(gradients)]).encode())
        ]
        miscounted, unequal = (sorted({name for report in reports for name in report[i]}) for i in (0, 1))
        if unequal:
            raise RuntimeError(
                f"tensor-parallel ranks have different gradients of {_name_list(unequal)}, although all of them hold copies"
            )
        if miscounted:
            raise RuntimeError(f"Megatron-Core's gradient norm counts {_name_list(miscounted)} twice or never")
        if self._device.type == "cpu":
            norm = self._with_float32_sums(gradients)
        if not math.isclose(norm, reference, rel_tol=SAME):
            raise RuntimeError(
                f"Megatron-Core's gradient norm is {reference:.6g}; the layout of the parameters gives {norm:.6g}"
            )

    def _with_float32_sums(self, gradients: Iterable[Gradient]) -> float:
        """Return the norm as torch.norm computes it, which Megatron-Core calls on CPUs. Collective over the component.

        In torch.norm one thread adds many squares in a row, so the norm of 134 million elements is 1.4% too small, and the norm
        of more elements is even smaller.
        """
        norms = [torch.norm(gradient).double() for parameter, _, gradient in gradients if self._local[id(parameter)][1].first]
        mine = sum((norm * norm for norm in norms), start=torch.zeros((), dtype=torch.float64))
        dist.all_reduce(mine, group=self._group)
        return math.sqrt(mine.item())

    def _unequal(self, gradients: Iterable[Gradient]) -> list[str]:
        """Return the names of the uncut parameters whose gradients differ between tensor-parallel ranks."""
        squares_of: dict[bool, dict[str, torch.Tensor]] = {False: {}, True: {}}
        for parameter, _, gradient in gradients:
            name, local_tensor = self._local[id(parameter)]
            if not local_tensor.cut:
                squares_of[local_tensor.expert][name] = squared_norm([gradient], self._device)
        unequal = []
        for expert, squares in squares_of.items():
            group = expert_tensor_group() if expert else tensor_group()
            if group.size() == 1 or not squares:
                continue
            mine = torch.stack([*squares.values()])  # the ranks have the same parameters, and ranges, in the same order
            every = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(every, mine, group=group)
            low, high = torch.stack(every).aminmax(dim=0)
            unequal += [name for name, bad in zip(squares, (high - low > 2 * SAME * high).tolist(), strict=True) if bad]
        return unequal


def _name_list(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
