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
    """One parameter of all experts of a layer."""

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
        """Return (rows of W, columns of W) of a box of the parameter."""
        first, second = (slice(start, start + size) for start, size in zip(box.offset[1:], box.size[1:], strict=True))
        return (second, first) if self.transposed else (first, second)


def expert_parameters(hf: PreTrainedModel) -> dict[str, ExpertParameter]:
    """Return the parameters of all experts of a model, by name."""
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
    """Return (name of the parameter in memory, expert) of an expert's layer; None for other names."""
    match = re.fullmatch(r"(.+)\.(\d+)\.(\w+)", layer)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else None


def stack_for_peft(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (lora_A.weight, lora_B.weight) as peft has them. a: A [r, in] of each expert; b: B [out, r] of each."""
    return torch.cat(list(a)), torch.stack(list(b), -1).flatten(1)
