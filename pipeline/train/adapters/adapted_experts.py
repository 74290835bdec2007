"""Experts that transformers keeps in one parameter, and their adapters, one per expert, for the FSDP2 backend.

The parameter is [E, out, in], or [E, in, out] where the module says `is_transposed`. Each expert's layer is
y = W x + b + scale B A x, or DoRA's. `adapt` gives the module parameters A [E, dim, in], B [E, out, dim] and, with DoRA,
m [E, out]. It also replaces the module's forward by one that works like transformers' own (`grouped_mm_experts_forward`): it
sorts pairs of a token and an expert by expert, and computes each layer of all experts as one grouped matrix product. The
adapters are cut like W, by experts: a rank holds the whole adapters of the experts that it holds, so expert parallelism and
`fully_shard` need nothing more.

In peft's files, the adapters of all experts are stacked too. peft's order (`ParamWrapper`) of a stack of E experts and rank r:

    lora_A.weight  [E r, in]   row e r + i is row i of expert e's A
    lora_B.weight  [out, r E]  column i E + e is column i of expert e's B
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear
from typing_extensions import override

from pipeline.boxes import Box
from pipeline.train.adapters import adapter_weights
from pipeline.train.adapters.linear import AdapterSwitch
from pipeline.train.adapters.spec import AdapterSpec


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter in which transformers stacks one weight of all experts of a layer."""

    name: str  # in memory: model.layers.0.mlp.experts.gate_up_proj
    experts: int
    rows: int  # out
    columns: int  # in
    transposed: bool

    def layer(self, expert: int) -> str:
        """Return the name of one expert's layer: model.layers.0.mlp.experts.3.gate_up_proj."""
        module, _, kind = self.name.rpartition(".")
        return f"{module}.{expert}.{kind}"

    def part(self, box: Box) -> tuple[slice, slice]:
        """Return (rows, columns) of an expert's W [out, in] that a box of the parameter covers."""
        first, second = (slice(start, start + size) for start, size in zip(box.offset[1:], box.size[1:], strict=True))
        return (second, first) if self.transposed else (first, second)


def expert_parameters(hf: PreTrainedModel) -> dict[str, ExpertParameter]:
    """Return {name in memory: description} of the parameters that stack the experts of a model."""
    parameters = {}
    for path, module in hf.named_modules():
        if not hasattr(module, "_is_expert_parallel"):  # of the classes whose implementation transformers lets one choose
            continue
        transposed = bool(module.is_transposed)
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                experts, *shape = parameter.shape
                rows, columns = reversed(shape) if transposed else shape
                parameters[f"{path}.{kind}"] = ExpertParameter(f"{path}.{kind}", experts, rows, columns, transposed)
    return parameters


def parameter_of(layer: str) -> tuple[str, int] | None:
    """Return (name of the parameter in memory, expert's number) of an expert's layer; None if `layer` has no such name."""
    match = re.fullmatch(r"(.+)\.(\d+)\.(\w+)", layer)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else None


def stack_for_peft(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (lora_A.weight, lora_B.weight) in peft's order. a: A [r, in] of each expert; b: B [out, r] of each expert."""
    return torch.cat(list(a)), torch.stack(list(b), -1).flatten(1)


ALIGNED = 16
"""Each row in a grouped matrix product must be a multiple of this number of bytes."""


def own_names(kind: str) -> tuple[str, str, str]:
    """Return the names of A, B and m among the module's parameters. kind: the name of W, such as gate_up_proj."""
    return f"lora_A_{kind}", f"lora_B_{kind}", f"lora_magnitude_vector_{kind}"


def adapt(module: nn.Module, kinds: Collection[str], spec: AdapterSpec, switch: AdapterSwitch) -> None:
    """Add uninitialized float32 adapters to the experts' parameters named in `kinds`, in place.

    module: the experts of a layer, of a class whose implementation transformers lets one choose.
    """
    transposed = bool(module.is_transposed)
    for kind in kinds:
        weight = module.get_parameter(kind)
        experts, *shape = weight.shape
        rows, columns = reversed(shape) if transposed else shape
        shapes = ((experts, spec.dim, columns), (experts, rows, spec.dim), (experts, rows))
        for name, shape in zip(own_names(kind), shapes[: 3 if spec.dora else 2], strict=False):
            empty = torch.empty(shape, dtype=torch.float32, device=weight.device)
            module.register_parameter(name, nn.Parameter(empty))
    module.__dict__ |= {"adapter_spec": spec, "adapter_switch": switch}
    kind = type(module)
    module.__class__ = type(f"Adapted{kind.__name__}", (AdaptedExperts, kind), {})


class AdaptedExperts(nn.Module):
    """The experts of a layer, some of whose parameters have adapters. `adapt` combines this class with transformers' class."""

    adapter_spec: AdapterSpec
    adapter_switch: AdapterSwitch
    has_gate: bool
    has_bias: bool
    is_transposed: bool

    @override
    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums [T, H] of the experts' outputs. hidden [T, H], index [T, K] int64, weights [T, K]."""
        if not self.adapter_switch.enabled:
            return super().forward(hidden, index, weights)  # pyright: ignore[reportAttributeAccessIssue] - transformers' class
        first = "gate_up_proj" if self.has_gate else "up_proj"
        experts, order = index.flatten().sort(stable=True)
        counts = torch.zeros(len(getattr(self, first)), dtype=torch.int32, device=index.device)
        ends = counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        product = self._product(first, hidden[order // index.shape[1]], experts, ends)
        inner = self._apply_gate(product) if self.has_gate else self.act_fn(product)  # pyright: ignore[reportCallIssue]
        outer = self._product("down_proj", inner, experts, ends) * weights.flatten()[order, None]
        return outer[order.argsort()].view(*index.shape, -1).sum(1).to(hidden.dtype)

    def _product(self, kind: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the output [P, out] of one layer of the experts.

        kind: the name of the layer's W. rows [P, in], experts [P] int64: pairs of a token and an expert, sorted by expert.
        ends [E] int32: where the pairs of each expert end.
        """
        weight = getattr(self, kind)
        bias = getattr(self, f"{kind}_bias")[experts] if self.has_bias else None
        output = _grouped_linear(rows, weight, ends, is_transposed=self.is_transposed)
        a, b, magnitude = (getattr(self, name, None) for name in own_names(kind))
        if a is not None and b is not None:
            output = self._adapted(output, rows, weight, (a, b, magnitude), experts, ends)
        return output if bias is None else output + bias

    def _adapted(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        weight: torch.Tensor,
        adapter: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        experts: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """Return a layer's output [P, out] with its adapter. output: W x [P, out], without the bias."""
        spec, (a, b, magnitude) = self.adapter_spec, adapter
        drops = self.adapter_switch.dropout and spec.dropout > 0
        dropped = _dropout(rows, spec.dropout) if drops and spec.dropout_input else rows
        added = _grouped_linear(_grouped_linear(dropped, _align(a, 1), ends), _align(b, 2), ends) * spec.scale
        if drops and not spec.dropout_input:
            added = _dropout(added, spec.dropout)
        if magnitude is None:
            return output + added
        # As in peft: dropout of the input applies to the part of W x that the magnitudes change, too.
        scaled = output if dropped is rows else _grouped_linear(dropped, weight, ends, is_transposed=self.is_transposed)
        factors = zip(weight.detach(), a.detach(), b.detach(), strict=True)  # one expert's norms at a time, to save memory
        norms = torch.stack(
            [adapter_weights.row_norms(w.T if self.is_transposed else w, x, y, spec.scale) for w, x, y in factors]
        )
        factor = (magnitude.to(norms.dtype) / norms).to(output.dtype)[experts]
        return output + (factor - 1) * scaled + factor * added


def _align(matrices: torch.Tensor, dim: int) -> torch.Tensor:
    """Return A [E, dim, in] or B [E, out, dim], padded with zeros to a rank that grouped products accept.

    dim: the tensor's dimension that is the rank.
    """
    short = -matrices.shape[dim] % (ALIGNED // matrices.element_size())
    return F.pad(matrices, (0, 0, 0, short) if dim == 1 else (0, short)) if short else matrices


def _dropout(rows: torch.Tensor, probability: float) -> torch.Tensor:
    """Drop entries of this rank's rows at random, and scale the rest.

    Ranks with the same tokens compute rows of different experts, so each rank draws from a generator of its own. Every rank
    advances torch's CPU generator by one draw, so this generator stays equal on all ranks.
    """
    seed = int(torch.randint(1 << 62, (), device="cpu")) ^ dist.get_rank()
    generator = torch.Generator(rows.device).manual_seed(seed)
    mask = torch.empty_like(rows).bernoulli_(1 - probability, generator=generator)
    return rows * mask / (1 - probability)
