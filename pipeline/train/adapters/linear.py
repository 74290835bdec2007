"""A linear layer with an adapter, for the FSDP2 backend: y = W x + b + scale B A x, or DoRA's.

Tensor parallelism cuts A and B like W. Column-wise: A is whole and B is cut by rows, like W. Row-wise: A is cut by columns,
like W, and B is whole; the ranks' parts of A x are summed before B is applied. Ranks communicate little more than A x [T, dim].
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from typing_extensions import override

from pipeline.train.adapters import adapter_weights
from pipeline.train.adapters.spec import AdapterSpec

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass
class AdapterSwitch:
    """Switches that control all adapters of a model in the current pass."""

    enabled: bool = True
    dropout: bool = False  # in training passes; log-probs are computed without

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters within this context, so that the model computes with W alone."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Apply the adapters' dropout within this context."""
        self.dropout = True
        try:
            yield
        finally:
            self.dropout = False


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter in float32.

    It has no attribute `weight`. Code that reads a layer's weight instead of calling the layer would ignore the adapter; here
    such code fails.
    """

    def __init__(self, base_layer: nn.Linear, spec: AdapterSpec, switch: AdapterSwitch):
        super().__init__()
        self.base_layer = base_layer
        options = {"bias": False, "dtype": torch.float32, "device": base_layer.weight.device}
        self.lora_A = nn.Linear(base_layer.in_features, spec.dim, **options)
        self.lora_B = nn.Linear(spec.dim, base_layer.out_features, **options)
        self.lora_magnitude_vector: nn.Parameter | None = None
        if spec.dora:
            empty = torch.empty(base_layer.out_features, dtype=torch.float32, device=base_layer.weight.device)
            self.lora_magnitude_vector = nn.Parameter(empty)
        self.sum_columns: adapter_weights.Sum | None = None  # over the ranks that hold other columns of W
        self._spec, self._switch = spec, switch

    @override
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for hidden [..., in]."""
        output = self.base_layer(hidden)
        if not self._switch.enabled:
            return output
        spec, dropped, drops = self._spec, hidden, self.drops
        if drops and spec.dropout_input:
            dropped = F.dropout(hidden, spec.dropout)
        added = self.lora_B(self.lora_A(dropped)) * spec.scale
        if drops and not spec.dropout_input:
            added = F.dropout(added, spec.dropout)
        if self.lora_magnitude_vector is None:
            return output + added
        # As in peft: dropout of the input applies to the part of W x that the magnitudes change, too.
        scaled = output if dropped is hidden else self.base_layer(dropped)
        if self.base_layer.bias is not None:
            scaled = scaled - _local(self.base_layer.bias)
        weight, a, b = (_local(layer.weight) for layer in (self.base_layer, self.lora_A, self.lora_B))
        norms = adapter_weights.row_norms(weight, a, b, spec.scale, self.sum_columns)
        factor = (_local(self.lora_magnitude_vector).to(norms.dtype) / norms).to(output.dtype)
        return output + (factor - 1) * scaled + factor * added

    @property
    def drops(self) -> bool:
        """Return whether the current pass applies the adapter's dropout."""
        return self._switch.enabled and self._switch.dropout and self._spec.dropout > 0

    def cut(self, style: ParallelStyle, mesh: DeviceMesh) -> list[str]:
        """Cut the adapter over the 1-d mesh like the linear layer, which is already cut. style: the layer's style.

        Returns the names of the adapter's parameters that are whole on every rank but have partial gradients.
        """
        if isinstance(style, ColwiseParallel):
            (layout,) = style.input_layouts
            parallelize_module(self.lora_B, mesh, style)
            if self.lora_magnitude_vector is not None:
                rows = distribute_tensor(self.lora_magnitude_vector.data, mesh, [Shard(0)])
                self.lora_magnitude_vector = nn.Parameter(rows)
            return ["lora_A.weight"] if _cuts_tokens(layout) else []
        assert isinstance(style, RowwiseParallel)  # the only other style of a linear layer
        (layout,) = style.output_layouts
        parallelize_module(self.lora_A, mesh, RowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=layout))
        self.sum_columns = functools.partial(_sum, mesh.get_group())
        uncut = ["lora_B.weight", *(["lora_magnitude_vector"] if self.lora_magnitude_vector is not None else [])]
        return uncut if _cuts_tokens(layout) else []


def _sum(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks of a group, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def _cuts_tokens(layout: Placement) -> bool:
    return not isinstance(layout, Replicate)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, with a graph."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
