"""LoRA and DoRA adapters in Megatron-Core's linear layers, under tensor, sequence, expert, pipeline and context parallelism.

Megatron-Core fuses projections: linear_qkv, and linear_fc1 of a gated MLP. B of a fused module consists of the B of each
projection, placed like the rows of W. For A there are two cases. With the targets linear_qkv and linear_fc1, the projections
share one A, which is stored once for each projection (as in LoRA of NVIDIA's Megatron-Bridge). With the targets linear_q,
linear_fc1_gate and so on, each projection has its own A, and these are stacked in one parameter (as in its CanonicalLoRA). The
two projections of an expert that share A are one layer, `gate_up_proj`, as in transformers.

A module's adapter is a submodule, and a forward hook adds its output. It is cut like W [out, in]: B if W is cut by rows, A if W
is cut by columns. The other matrix is whole on every rank. Ranks exchange only the product A x, [tokens, dim]:

    W cut by rows      A is whole. With sequence parallelism, its product of this rank's tokens is gathered before B.
    W cut by columns   The ranks' products A x are summed, and the sums of this rank's tokens are multiplied by the whole B.
    W of an expert     The dispatcher gathers tokens and sums outputs over ranks that cut an expert, so no exchange is needed.

Where a rank has only a part of the tokens or of the output, its gradient of a whole matrix is partial
(`ModuleAdapter.partial`). `adapted_stage.py` attaches the adapters, and sums these gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from torch import nn
from typing_extensions import override

from pipeline.models.decoder import identity
from pipeline.models.family import Parameter, Split
from pipeline.models.recorded_layout import Shape, cut, record
from pipeline.train.adapters.adapter_weights import initial_magnitude, merge, row_norms
from pipeline.train.adapters.linear import AdapterSwitch
from pipeline.train.adapters.modules import AdaptedModule
from pipeline.train.adapters.spec import MAGNITUDE, A, AdapterSpec, B
from pipeline.train.megatron.groups import expert_tensor_group, tensor_group
from pipeline.train.megatron.local_modules import rms_norm

SUBMODULE = "adapter"  # of the adapted module


def adapter_parameters(module: AdaptedModule, spec: AdapterSpec, shapes: Mapping[str, Shape]) -> dict[str, Parameter]:
    """Return {global name: parameter} of a whole adapter: A [stacked * dim, in], B [out, dim] and, with DoRA, m [out].

    shapes: {name: shape} of the model's tensors on disk.
    """
    weight, names = module.weight, module.names
    # For each source of W, the number of its rows if it has no adapter, else None.
    zeros = tuple(rows if layer is None else None for layer, rows in zip(module.layers, module.rows(shapes), strict=True))
    rows = partial(_rows, weight.function if len(module.layers) > 1 else identity, zeros)
    cut_b, cut_a = ("none", "columns") if weight.split == "columns" else (weight.split, "none")
    of_a, prefix = names[:1] if module.shared else names, f"{module.name}.{SUBMODULE}"
    parameters = {
        f"{prefix}.lora_A": Parameter(tuple(layer + A for layer in of_a), _stack, cut_a, weight.expert),
        f"{prefix}.lora_B": Parameter(tuple(layer + B for layer in names), rows, cut_b, weight.expert),
    }
    if spec.dora:
        parameters[f"{prefix}.magnitude"] = Parameter(tuple(layer + MAGNITUDE for layer in names), rows, cut_b, weight.expert)
    return parameters


def owners(module: AdaptedModule, rows: tuple[int, ...]) -> list[int]:
    """Return, for each row of W [out, in], the number of its A matrix; -1 for a row without an adapter. rows: of each layer."""
    if module.shared or len(module.layers) == 1:
        return [0] * sum(rows)
    shape, pieces = record(module.weight.function, [(str(i), (count,)) for i, count in enumerate(rows)])
    adapted = [i for i, layer in enumerate(module.layers) if layer is not None]
    owners = [-1] * shape[0]
    for piece in pieces:
        if int(piece.name) in adapted:
            start = piece.target.offset[0]
            owners[start : start + piece.target.size[0]] = [adapted.index(int(piece.name))] * piece.target.size[0]
    return owners


def _stack(*matrices: torch.Tensor) -> torch.Tensor:
    first, *tail = matrices
    return torch.cat(matrices) if tail else first


def _rows(function, zeros: tuple[int | None, ...], *sources: torch.Tensor) -> torch.Tensor:
    """Return `function` of one tensor for each source of W, such as the sources' B matrices.

    function: makes W from its sources. zeros: for each source, None if its tensor is the next of `sources`, else the number of
    rows of the zeros that replace it.
    """
    remaining = iter(sources)
    return function(*(next(remaining) if rows is None else sources[0].new_zeros(rows, *sources[0].shape[1:]) for rows in zeros))


Cut = Literal["rows", "columns", "none"]


class ModuleAdapter(nn.Module):
    """This rank's part of one module's adapter."""

    def __init__(
        self, layer: nn.Module, target: AdaptedModule, rows: tuple[int, ...], spec: AdapterSpec, switch: AdapterSwitch
    ):
        """rows: of B of each of the target's layers."""
        super().__init__()
        weight: Any = layer.weight
        config: Any = layer.config
        self._spec, self._switch = spec, switch
        expert = target.weight.expert is not None
        self._group = expert_tensor_group() if expert else tensor_group()
        # As Megatron-Core's layers decide it; shared experts that overlap with the dispatch set it too.
        self._exchanges = not getattr(layer, "explicit_expert_comm", False) and getattr(layer, "parallel_mode", "") is not None
        self._cut = _cut_of(layer, target.weight.split, sum(rows), self._group)
        # A layer that is whole on every rank has a rank's own tokens; TransformerEngine gives it no parallel mode.
        splits = self._exchanges or self._cut == "none"
        self._sequence = bool(config.sequence_parallel) and splits and self._group.size() > 1 and not expert
        self._expert = expert
        options = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(target.stacked * spec.dim, weight.shape[1], **options))
        self.lora_B = nn.Parameter(torch.empty(weight.shape[0], spec.dim, **options))
        self.magnitude = nn.Parameter(torch.empty(weight.shape[0], **options)) if spec.dora else None
        owner = torch.tensor(owners(target, rows), device=weight.device)  # of each row
        if self._cut == "rows":
            owner = cut(owner, target.weight.split, self._group.rank(), self._group.size())
        stacked = torch.arange(target.stacked, device=weight.device)
        mask = owner[:, None] == stacked  # [out, stacked]
        self.register_buffer("_mask", None if mask.all() else mask.to(weight.dtype), persistent=False)
        adapted = owner >= 0  # [out]
        self.register_buffer("_adapted", None if adapted.all() else adapted, persistent=False)
        self._norm = _fused_norm(layer)
        for parameter in self.parameters():  # Megatron-Core reduces their gradients as the weight's
            setattr(parameter, "allreduce", bool(getattr(weight, "allreduce", True)))  # noqa: B010 - no attribute of a tensor

    # ---- parameters -----------------------------------------------------------------------------------------------------

    @property
    def partial(self) -> list[nn.Parameter]:
        """The parameters whose gradients on this rank are partial sums, which must be summed over `group`."""
        if self._group.size() == 1:
            return []
        of_rows = [p for p in (self.lora_B, self.magnitude) if p is not None]
        if self._cut == "none":
            return [self.lora_A, *of_rows] if self._sequence else []
        if self._sequence or not self._exchanges:
            return [self.lora_A] if self._cut == "rows" else of_rows
        return []

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that cut the module's weight."""
        return self._group

    # ---- computation ----------------------------------------------------------------------------------------------------

    @override
    def forward(self, layer: nn.Module, inputs: torch.Tensor, output: torch.Tensor, biased: bool = True) -> torch.Tensor:
        """Return the module's output [t, ..., out] with its adapter.

        inputs [t, ..., in], output [t, ..., out]: the module's. biased: whether `output` contains the module's bias, if it has
        one.
        """
        if self._norm is not None:
            inputs = self._norm(inputs)
        if self._spec.dropout_input:
            inputs = self._dropout(inputs, shared=self._cut != "columns" and not self._sequence)
        product = self._exchange(F.linear(inputs, self.lora_A))
        delta = F.linear(product, self._b())
        if not self._spec.dropout_input:
            delta = self._dropout(delta, shared=self._cut != "rows" and not self._sequence)
        delta = delta * self._spec.scale
        if self.magnitude is None:
            return output + delta
        norms = self._row_norms(layer).to(self.magnitude.dtype)
        factors = self._magnitudes(norms) / norms
        bias: torch.Tensor | None = getattr(layer, "bias", None)
        if bias is None or not biased or not bias.numel():  # TransformerEngine has an empty tensor for none
            return factors * (output + delta)
        return factors * (output - bias + delta) + bias

    def initial_magnitude(self, layer: nn.Module) -> torch.Tensor:
        """Return DoRA's initial magnitudes of this rank's rows, [out] float32. Collective over the ranks that cut W."""
        weight: Any = layer.weight
        return initial_magnitude(weight.detach(), self._sum_columns)

    def merged(self, layer: nn.Module) -> torch.Tensor:
        """Return this rank's part of the merged weight, in the weight's precision. Collective with DoRA."""
        weight: Any = layer.weight
        with torch.no_grad():
            magnitudes = None if self.magnitude is None else self._magnitudes(self._row_norms(layer))
            return merge(weight, self.lora_A, self._b(), self._spec.scale, magnitudes, self._sum_columns)

    def _b(self) -> torch.Tensor:
        """Return B [out, stacked * dim], where each row has zeros in the columns of the A matrices that it does not use."""
        mask: Any = self._mask
        if mask is None:
            return self.lora_B
        return (mask[:, :, None] * self.lora_B[:, None, :]).flatten(1)

    def _magnitudes(self, norms: torch.Tensor) -> torch.Tensor:
        """Return DoRA's magnitudes [out]. A row without an adapter gets its norm in `norms` [out], so it does not change."""
        magnitude = self.magnitude
        adapted: Any = self._adapted
        assert magnitude is not None  # with DoRA
        return magnitude if adapted is None else torch.where(adapted, magnitude.to(norms.dtype), norms)

    def _row_norms(self, layer: nn.Module) -> torch.Tensor:
        weight: Any = layer.weight
        return row_norms(weight.detach(), self.lora_A, self._b(), self._spec.scale, self._sum_columns)

    def _sum_columns(self, squares: torch.Tensor) -> torch.Tensor:
        if self._cut == "columns" and self._group.size() > 1:
            dist.all_reduce(squares, group=self._group)
        return squares

    def _exchange(self, product: torch.Tensor) -> torch.Tensor:
        """Return the product A x that this rank's B needs, from this rank's own product A x [t, ..., dim]."""
        group: Any = self._group
        if not self._exchanges or self._cut == "none" or group.size() == 1:
            return product
        if self._cut == "rows":
            if self._sequence:
                return tensor_parallel.gather_from_sequence_parallel_region(product, group=group)
            return tensor_parallel.copy_to_tensor_model_parallel_region(product, group=group)
        if self._sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(product, group=group)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(product, group=group)

    def _dropout(self, tensor: torch.Tensor, shared: bool) -> torch.Tensor:
        """Apply dropout in training passes. shared: the group's ranks have the same entries, and must drop the same ones."""
        if not (self._switch.dropout and self._spec.dropout):
            return tensor
        if shared and not self._expert:
            return F.dropout(tensor, self._spec.dropout)
        names = (get_expert_parallel_rng_tracker_name(),) if self._expert else ()
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork(*names):
            return F.dropout(tensor, self._spec.dropout)


def _cut_of(layer: nn.Module, split: Split, rows: int, group: dist.ProcessGroup) -> Cut:
    """Return how W [rows, in] is cut. Multi-latent attention's down-projections are whole on every rank."""
    weight: Any = layer.weight
    if split == "columns":
        return "columns"
    return "none" if group.size() > 1 and weight.shape[0] == rows else "rows"


def _fused_norm(layer: nn.Module) -> Any:
    """Return the norm that a module of TransformerEngine applies to its input; None if it has none."""
    if not hasattr(layer, "layer_norm_weight"):
        return None

    def norm(inputs: torch.Tensor) -> torch.Tensor:
        weight: Any = layer.layer_norm_weight
        eps: Any = layer.eps
        config: Any = layer.config
        return rms_norm(inputs, weight, eps, config.layernorm_zero_centered_gamma)

    return norm
