"""Experts that transformers keeps in one parameter, and the names of their adapters: one adapter per expert.

The parameter is [E, out, in], or [E, in, out] where the module says `is_transposed`. In memory, and in peft's files, the
adapters of all experts are stacked too. peft's order (`ParamWrapper`) of a stack of E experts and rank r:

    lora_A.weight  [E r, in]   row e r + i is row i of expert e's A
    lora_B.weight  [out, r E]  column i E + e is column i of expert e's B
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pipeline.boxes import Box


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
