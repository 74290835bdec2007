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
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from torch import nn
from typing_extensions import override

from pipeline.config import MegatronLoRAConfig
from pipeline.models.decoder import identity
from pipeline.models.family import Parameter
from pipeline.models.recorded_layout import Shape, cut, record
from pipeline.train.adapters.adapter_weights import initial_magnitude, merge, row_norms
from pipeline.train.adapters.linear import AdapterSwitch
from pipeline.train.adapters.modules import AdaptedModule, choose
from pipeline.train.adapters.spec import MAGNITUDE, A, AdapterSpec, B
from pipeline.train.megatron.groups import tensor_group
from pipeline.train.megatron.local_modules import rms_norm

SUBMODULE = "adapter"  # of the adapted module


class Target(AdaptedModule):
    """A module that gets adapters, with its parameters as functions of tensors on disk."""

    @property
    def stacked(self) -> int:
        """The number of A matrices [dim, in] in the module's parameter A."""
        return 1 if self.shared else len(self.names)

    def parameters(self, spec: AdapterSpec) -> dict[str, Parameter]:
        """Return {global name: parameter} of the whole adapter: A [stacked * dim, in], B [out, dim] and, with DoRA, m [out]."""
        split, expert = self.weight.split, self.weight.expert
        of_a = self.names[:1] if self.shared else self.names
        rows = partial(_rows, self.weight.function if len(self.layers) > 1 else identity, self._zeros())
        cut = "none" if split == "columns" else split
        columns = "columns" if split == "columns" else "none"
        name = f"{self.module}.{SUBMODULE}"
        parameters = {
            f"{name}.lora_A": Parameter(tuple(layer + A for layer in of_a), _stack, columns, expert),
            f"{name}.lora_B": Parameter(tuple(layer + B for layer in self.names), rows, cut, expert),
        }
        if spec.dora:
            parameters[f"{name}.magnitude"] = Parameter(tuple(layer + MAGNITUDE for layer in self.names), rows, cut, expert)
        return parameters

    def owners(self) -> list[int]:
        """Return, for each row of W [out, in], the number of its A matrix; -1 for a row without an adapter."""
        if self.shared or len(self.layers) == 1:
            return [0] * sum(self.rows)
        shape, pieces = record(self.weight.function, [(str(i), (count,)) for i, count in enumerate(self.rows)])
        adapted = [i for i, layer in enumerate(self.layers) if layer is not None]
        owners = [-1] * shape[0]
        for piece in pieces:
            if int(piece.name) in adapted:
                start = piece.target.offset[0]
                owners[start : start + piece.target.size[0]] = [adapted.index(int(piece.name))] * piece.target.size[0]
        return owners

    def duplicates(self) -> dict[str, list[str]]:
        """Return {name on disk of an A: the other names under which the same A is stored}."""
        first, *copies = self.names
        return {first + A: [layer + A for layer in copies]} if self.shared and copies else {}

    def _zeros(self) -> tuple[int | None, ...]:
        """Return, for each source of W, the number of its rows if it has no adapter, else None."""
        return tuple(count if layer is None else None for layer, count in zip(self.layers, self.rows, strict=True))


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


def targets(config: MegatronLoRAConfig, parameters: Mapping[str, Parameter], shapes: Mapping[str, Shape]) -> list[Target]:
    """Return the modules that get adapters, in the model's order.

    parameters: {global name: parameter} of the whole model. shapes: {name: shape} of the tensors on disk. Raises RecipeError as
    `choose` does.
    """
    return [Target.of(chosen, shapes) for chosen in choose(config, parameters)]


Cut = Literal["rows", "columns", "none"]


class ModuleAdapter(nn.Module):
    """This rank's part of one module's adapter."""

    def __init__(self, layer: nn.Module, target: Target, spec: AdapterSpec, switch: AdapterSwitch):
        super().__init__()
        weight: Any = layer.weight
        config: Any = layer.config
        self._spec, self._switch = spec, switch
        expert = target.weight.expert is not None
        self._group = _tensor_group(expert)
        # As Megatron-Core's layers decide it; shared experts that overlap with the dispatch set it too.
        self._exchanges = not getattr(layer, "explicit_expert_comm", False) and getattr(layer, "parallel_mode", "") is not None
        self._cut = _cut_of(layer, target, self._group)
        # A layer that is whole on every rank has a rank's own tokens; TransformerEngine gives it no parallel mode.
        splits = self._exchanges or self._cut == "none"
        self._sequence = bool(config.sequence_parallel) and splits and self._group.size() > 1 and not expert
        self._expert = expert
        options = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(target.stacked * spec.dim, weight.shape[1], **options))
        self.lora_B = nn.Parameter(torch.empty(weight.shape[0], spec.dim, **options))
        self.magnitude = nn.Parameter(torch.empty(weight.shape[0], **options)) if spec.dora else None
        owners = torch.tensor(target.owners(), device=weight.device)
        if self._cut == "rows":
            owners = cut(owners, target.weight.split, self._group.rank(), self._group.size())
        stacked = torch.arange(target.stacked, device=weight.device)
        mask = owners[:, None] == stacked  # [out, stacked]
        self.register_buffer("_mask", None if mask.all() else mask.to(weight.dtype), persistent=False)
        adapted = owners >= 0  # [out]
        self.register_buffer("_adapted", None if adapted.all() else adapted, persistent=False)
        self._norm = _fused_norm(layer)
        self._mark(bool(getattr(weight, "allreduce", True)))

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

    def _mark(self, reduced_densely: bool) -> None:
        """Set the parameters' attributes by which Megatron-Core reduces gradients and counts each once in the norm.

        reduced_densely: the attribute `allreduce` of the module's weight.
        """
        uncut = {"rows": (self.lora_A,), "columns": (self.lora_B, self.magnitude), "none": (*self.parameters(),)}[self._cut]
        for parameter in self.parameters():
            duplicate = any(parameter is copy for copy in uncut) and self._group.rank() > 0
            attributes = {"allreduce": reduced_densely, "tensor_model_parallel": True, "shared": duplicate}
            for name, value in attributes.items():
                setattr(parameter, name, value)

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


def _tensor_group(expert: bool) -> dist.ProcessGroup:
    if not expert:
        return tensor_group()
    group: Any = parallel_state.get_expert_tensor_parallel_group()
    return group


def _cut_of(layer: nn.Module, target: Target, group: dist.ProcessGroup) -> Cut:
    """Return how W is cut. Multi-latent attention's down-projections are whole on every rank."""
    weight: Any = layer.weight
    if target.weight.split == "columns":
        return "columns"
    return "none" if group.size() > 1 and weight.shape[0] == sum(target.rows) else "rows"


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
